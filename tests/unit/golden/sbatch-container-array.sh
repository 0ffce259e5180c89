#!/bin/bash

# Parameters
#SBATCH --array=0-3%4
#SBATCH --comment=refiner-array-MARK
#SBATCH --cpus-per-task=16
#SBATCH --error=/w/batches/refiner-array-MARK/%A_%a_0_log.err
#SBATCH --gpus-per-node=4
#SBATCH --job-name=refiner-array-MARK
#SBATCH --mem=200GB
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/w/batches/refiner-array-MARK/%A_%a_0_log.out
#SBATCH --partition=low
#SBATCH --signal=TERM@430
#SBATCH --time=600

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /w/batches/refiner-array-MARK/%A_%a_%t_log.out --error /w/batches/refiner-array-MARK/%A_%a_%t_log.err --overlap --nodes=1 --ntasks=1 --cpus-per-task=16 apptainer exec --nv /images/refiner.sif env PYTHONSAFEPATH=1 python3 -P -u -m submitit.core._submit /w/batches/refiner-array-MARK

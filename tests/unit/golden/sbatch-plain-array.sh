#!/bin/bash

# Parameters
#SBATCH --array=0-3%4
#SBATCH --comment=refiner-array-MARK
#SBATCH --cpus-per-task=1
#SBATCH --error=/w/batches/refiner-array-MARK/%A_%a_0_log.err
#SBATCH --job-name=refiner-array-MARK
#SBATCH --mem=1GB
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/w/batches/refiner-array-MARK/%A_%a_0_log.out
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --time=10

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /w/batches/refiner-array-MARK/%A_%a_%t_log.out --error /w/batches/refiner-array-MARK/%A_%a_%t_log.err --overlap --nodes=1 --ntasks=1 --cpus-per-task=1 env PYTHONSAFEPATH=1 python -P -u -m submitit.core._submit /w/batches/refiner-array-MARK

#!/bin/bash

# Parameters
#SBATCH --comment=refiner-data-STAGE-0001-MARK
#SBATCH --cpus-per-task=16
#SBATCH --error=/w/stages/data-MARK/attempts/0001/submitit/%j_0_log.err
#SBATCH --gpus-per-node=4
#SBATCH --job-name=refiner-data-STAGE-0001-MARK
#SBATCH --mem=200GB
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/w/stages/data-MARK/attempts/0001/submitit/%j_0_log.out
#SBATCH --partition=low
#SBATCH --signal=TERM@430
#SBATCH --time=600

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /w/stages/data-MARK/attempts/0001/submitit/%j_%t_log.out --error /w/stages/data-MARK/attempts/0001/submitit/%j_%t_log.err --overlap --nodes=1 --ntasks=1 --cpus-per-task=16 apptainer exec --nv /images/refiner.sif env PYTHONSAFEPATH=1 python3 -P -u -m submitit.core._submit /w/stages/data-MARK/attempts/0001/submitit

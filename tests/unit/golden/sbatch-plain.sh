#!/bin/bash

# Parameters
#SBATCH --comment=refiner-data-STAGE-0001-MARK
#SBATCH --cpus-per-task=1
#SBATCH --error=/w/stages/data-MARK/attempts/0001/submitit/%j_0_log.err
#SBATCH --job-name=refiner-data-STAGE-0001-MARK
#SBATCH --mem=1GB
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/w/stages/data-MARK/attempts/0001/submitit/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --time=10

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /w/stages/data-MARK/attempts/0001/submitit/%j_%t_log.out --error /w/stages/data-MARK/attempts/0001/submitit/%j_%t_log.err --overlap --nodes=1 --ntasks=1 --cpus-per-task=1 env PYTHONSAFEPATH=1 python -P -u -m submitit.core._submit /w/stages/data-MARK/attempts/0001/submitit

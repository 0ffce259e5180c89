#!/bin/bash

# Parameters
#SBATCH --account=lab
#SBATCH --comment=refiner-data-STAGE-0001-MARK
#SBATCH --constraint=hbm3
#SBATCH --cpus-per-task=16
#SBATCH --error=/w/stages/data-MARK/attempts/0001/submitit/%j_0_log.err
#SBATCH --exclude=n7,n9
#SBATCH --exclusive
#SBATCH --gres=gpu:h100:4
#SBATCH --job-name=refiner-data-STAGE-0001-MARK
#SBATCH --mail-type=FAIL
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/w/stages/data-MARK/attempts/0001/submitit/%j_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=normal
#SBATCH --requeue
#SBATCH --reservation=week
#SBATCH --signal=TERM@430
#SBATCH --time=600

# setup
source /etc/profile.d/modules.sh
module load cuda/12.8

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /w/stages/data-MARK/attempts/0001/submitit/%j_%t_log.out --error /w/stages/data-MARK/attempts/0001/submitit/%j_%t_log.err --overlap --nodes=1 --ntasks=1 --cpus-per-task=16 env PYTHONSAFEPATH=1 python -P -u -m submitit.core._submit /w/stages/data-MARK/attempts/0001/submitit

#!/bin/bash

# Parameters
#SBATCH --account=lab
#SBATCH --array=0-3%4
#SBATCH --comment=refiner-array-MARK
#SBATCH --constraint=hbm3
#SBATCH --cpus-per-task=16
#SBATCH --error=/w/batches/refiner-array-MARK/%A_%a_0_log.err
#SBATCH --exclude=n7,n9
#SBATCH --exclusive
#SBATCH --gres=gpu:h100:4
#SBATCH --job-name=refiner-array-MARK
#SBATCH --mail-type=FAIL
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/w/batches/refiner-array-MARK/%A_%a_0_log.out
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
srun --unbuffered --output /w/batches/refiner-array-MARK/%A_%a_%t_log.out --error /w/batches/refiner-array-MARK/%A_%a_%t_log.err --overlap --nodes=1 --ntasks=1 --cpus-per-task=16 env PYTHONSAFEPATH=1 python -P -u -m submitit.core._submit /w/batches/refiner-array-MARK

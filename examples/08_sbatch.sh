#!/bin/bash
# A training script with Cordee's two lines (02_cordee.py) in your own sbatch: `sbatch examples/08_sbatch.sh train.py`.
# Preempted, requeued or out of time, it resumes where it was; no Cordee server is needed.
#SBATCH --job-name=my-run --requeue --open-mode=append
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --time=4:00:00
#SBATCH --signal=USR1@120
export CORDEE_CHECKPOINT_TO=$SLURM_SUBMIT_DIR/checkpoints/$SLURM_JOB_NAME # on a file system that all nodes see
export CORDEE_GRACE_S=100
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=0 bash -c \
    'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec python "$@"' -- "$@"
code=$?
case $code in 75 | 60) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit $code

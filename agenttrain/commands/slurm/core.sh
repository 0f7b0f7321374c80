# From here on as `agenttrain submit` writes it.
# Before the end of the wall time, and at a preemption, a signal asks the run to save and to stop. It
# ends with 75; the job then goes back into the queue, and resumes the run in the same folder.
export PYTHONUNBUFFERED=1 SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
nodes=() training=${training:-$SLURM_NNODES}
if [ "$training" -gt 1 ]; then
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  port=$((20000 + SLURM_JOB_ID % 20000))
  nodes=("distributed.nodes=$training" "distributed.rendezvous=$first:$port")
fi

# USR1 for both: srun passes it on to every node, and would answer TERM by killing them.
run= stop= servers=
trap 'stop=1; kill -s USR1 "$run" 2> /dev/null' USR1 TERM
if declare -F serve > /dev/null; then serve; fi
# When a node fails or is done, the others have some minutes to save; then they are killed.
srun --nodes="$training" --ntasks="$training" --relative=0 --ntasks-per-node=1 \
  --kill-on-bad-exit=0 --wait=300 "${srun[@]}" \
  python3 -m agenttrain.cli "${arguments[@]}" "${nodes[@]}" &
run=$!
[ -z "$stop" ] || kill -s USR1 "$run" # the signal came before the run had a process id
# A signal ends `wait` with a code of its own; the run's code is that of a `wait` without a signal.
while stop=; wait "$run"; code=$?; [ -n "$stop" ]; do :; done
if [ -n "$servers" ]; then kill -s USR1 "$servers" 2> /dev/null; wait "$servers"; fi

# 138, 143: the signal came before the run could handle it, or it had no time to save.
case "$code" in 75 | 138 | 143) ;; *) exit "$code" ;; esac
trap '' USR1 TERM
# An array's own number would put all of its jobs back. A job that is not running any more has been
# cancelled, or SLURM has put it back itself.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
state=$(squeue --noheader --jobs="$job" --format=%T)
if [ "$state" = RUNNING ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_requeues" ]; then
  trap - TERM
  scontrol requeue "$job" && sleep 3600 # until SLURM ends this script
fi
echo "not done, and not put back into the queue; to go on submit this script again"
exit "$code"

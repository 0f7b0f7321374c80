# From here on as `agenttrain submit` writes it.
# Before the end of the wall time, and at a preemption, the run is told by a signal to save what it
# did; it then exits with 75, and the job goes back into the queue and goes on in the same folder.
export PYTHONUNBUFFERED=1 SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
nodes=()
if [ "$SLURM_NNODES" -gt 1 ]; then
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  nodes=("distributed.nodes=$SLURM_NNODES" "distributed.rendezvous=$first:$((20000 + SLURM_JOB_ID % 20000))")
fi

# USR1 for both: srun passes it on to every node, and would answer TERM by killing them.
run= told=
trap 'told=1; kill -s USR1 "$run"' USR1 TERM
# A node that fails or is done leaves the others some minutes to save; then they are ended.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=300 "${srun[@]}" \
  python3 -m agenttrain.cli "${arguments[@]}" "${nodes[@]}" &
run=$!
# A signal ends `wait`, with a code of its own: the run's is that of a wait without one.
while told=; wait "$run"; code=$?; [ -n "$told" ]; do :; done

if [ "$code" = 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_requeues" ]; then
  trap '' USR1 TERM
  # An array's own number would put all of its jobs back.
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  if scontrol requeue "${job:-$SLURM_JOB_ID}"; then
    trap - TERM
    sleep 3600 # until SLURM ends this script: if it ended itself, the job could count as failed
  fi
fi
[ "$code" = 75 ] && echo "not done, and not put back into the queue: submit this script again"
exit "$code"

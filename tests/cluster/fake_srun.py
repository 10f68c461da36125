"""A stand-in for `srun` on one machine: `fake_srun.py [OPTION ...] COMMAND ...` starts tasks as the variables say.

`FAKE_NODES` x `FAKE_TASKS_PER_NODE` tasks get what SLURM gives them and JAX's detection reads. The exit status is the
highest of any task, as srun's is; where one fails, the others get SIGTERM, as with --kill-on-bad-exit.
"""

import os
import subprocess
import sys
import time

nodes, per_node = (int(os.environ.get(name, "1")) for name in ("FAKE_NODES", "FAKE_TASKS_PER_NODE"))
count = nodes * per_node
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)

tasks = []
for index in range(count):
    told = {
        "SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID", "4711"),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node),
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index % per_node),
        "SLURM_NODEID": str(index // per_node),
    }
    tasks.append(subprocess.Popen(command, env={**os.environ, **told}))
try:
    deadline = time.monotonic() + 60
    while any(task.poll() is None for task in tasks) and time.monotonic() < deadline:
        if any(task.poll() for task in tasks):
            for task in tasks:
                task.terminate()
            deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.05)
finally:
    for task in tasks:
        task.kill()
        task.wait()
sys.exit(max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks))

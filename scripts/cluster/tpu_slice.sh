#!/usr/bin/env bash
# Trains on Cloud TPU: one slice, or several (multislice). You need a Google Cloud project with the TPU API and quota,
# and `gcloud` (`gcloud auth login; gcloud config set project MY_PROJECT`).
#
#   export NAME=my-tpu ZONE=us-east5-a TYPE=v5p-32 RUNTIME=v2-alpha-tpuv5    # SLICES=2 for multislice, SPOT=1 for spot
#   scripts/cluster/tpu_slice.sh create      # queues for the hardware
#   scripts/cluster/tpu_slice.sh status      # wait for ACTIVE
#   scripts/cluster/tpu_slice.sh install     # on every host; INSTALL says what (default: zero-jax with its TPU extra)
#   scripts/cluster/tpu_slice.sh train --name my-run --checkpoints gs://my-bucket/runs --data /mnt/text
#   scripts/cluster/tpu_slice.sh log         # of the first host; Ctrl-C leaves the run alone
#   scripts/cluster/tpu_slice.sh stop        # saves, and ends
#   scripts/cluster/tpu_slice.sh delete      # TPUs cost money until then
#
# A TPU slice of several hosts runs one process a host, all of them the same command: `jax.distributed.initialize` asks
# the metadata server who they are. The hosts share no disk: checkpoints go to a bucket, and the text is copied to every
# host, or a bucket mounted there (gcsfuse). systemd keeps the processes: they survive your connection, and are started
# again, from the last checkpoint, after status 75 (saved and stopped), 76 (a hung step) or a signal, and when another
# host has failed; not after 1, 2 or 3, which would happen again.
# Where spot TPUs are taken away, `status` says SUSPENDED: delete, create, install and train again; the run goes on.
set -euo pipefail

usage="usage: NAME=... ZONE=... tpu_slice.sh create|status|install|train [OPTION ...]|log|stop|delete"
action=${1:?$usage}
shift
name=${NAME:?NAME: a name of your choice for the TPUs}
zone=${ZONE:?ZONE: where you have quota, such as us-east5-a}

on_all() {
    gcloud compute tpus queued-resources ssh "$name" --zone="$zone" --node=all --worker=all --command="$1"
}

case $action in
    create)
        type=${TYPE:?TYPE: such as v5p-32}
        runtime=${RUNTIME:?RUNTIME: such as v2-alpha-tpuv5}
        wanted=(--zone="$zone" --accelerator-type="$type" --runtime-version="$runtime")
        if [ "${SLICES:-1}" -gt 1 ]; then
            wanted+=(--node-count="$SLICES" --node-prefix="$name")
        else
            wanted+=(--node-id="$name")
        fi
        if [ -n "${SPOT:-}" ]; then
            wanted+=(--spot)
        fi
        gcloud compute tpus queued-resources create "$name" "${wanted[@]}"
        ;;
    status)
        gcloud compute tpus queued-resources describe "$name" --zone="$zone" --format="value(state.state)"
        ;;
    install)
        printf -v what '%q' "${INSTALL:-zero-jax[all,tpu]}"
        on_all "python3 -m venv ~/zero-jax && ~/zero-jax/bin/pip install --quiet $what"
        ;;
    train)
        options=""
        if [ $# -gt 0 ]; then
            printf -v options ' %q' "$@"
        fi
        # The home folder and the user are those of the host: they are not to be filled in here.
        # shellcheck disable=SC2016
        on_all 'sudo systemctl reset-failed zero-jax 2>/dev/null
            sudo systemd-run --unit=zero-jax --uid="$(id -u)" --working-directory="$HOME" \
            --property=Restart=on-failure --property=RestartSec=15 --property="RestartPreventExitStatus=1 2 3" \
            --property=StartLimitIntervalSec=3600 --property=StartLimitBurst=10 \
            --property=KillMode=mixed --property=TimeoutStopSec=300 \
            "$HOME/zero-jax/bin/zero-jax" train --resume auto'"$options"
        ;;
    log)
        gcloud compute tpus queued-resources ssh "$name" --zone="$zone" --node=0 --worker=0 \
            --command="journalctl --unit=zero-jax --output=cat --lines=200 --follow"
        ;;
    stop)
        on_all "sudo systemctl stop zero-jax"
        ;;
    delete)
        gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force
        ;;
    *)
        echo "$usage" >&2
        exit 2
        ;;
esac

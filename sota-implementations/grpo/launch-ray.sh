#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Starts Ray on several machines, runs a training script on this one, and ends Ray again. See --help.

set -euo pipefail

usage() {
    cat <<'HELP'
Usage: launch-ray.sh --hosts HOST[,HOST…] [OPTION…] [-- OVERRIDE…]
       sbatch [--nodes=N] launch-ray.sh [OPTION…] [-- OVERRIDE…]

Starts a Ray cluster of this machine and the others, runs a training script on it with hardware=ray-cluster, and ends
the cluster when the script ends, however it ends. The others are reached with ssh, without a password, or are the
machines of the SLURM allocation that this runs in. The project and its environment must be under the same paths on
all of them.

  --hosts HOSTS   machines besides this one, separated by commas; not with SLURM
  --address IP    address of this machine that the others reach; the first of `hostname -I` unless given
  --port PORT     where Ray listens on this machine; 6379 unless given
  --venv FOLDER   the virtual environment to activate on the others; the one that is active here unless given
  --script FILE   the training script; grpo-async.py beside this file unless given
  --timeout S     seconds to wait for all machines; 300 unless given
  --dry-run       say what would be done, and do nothing
  --help          this text

What comes after -- goes to the script:

  launch-ray.sh --hosts gpu2,gpu3 -- task=gsm8k engine.num_replicas=23 run.path=/shared/runs/gsm8k
  sbatch --nodes=2 launch-ray.sh -- task=math

engine.num_replicas is the number of GPUs less the trainer's one (15 for two machines with eight, as configured).
Exit status: the script's; 2 for wrong use; 1 when the cluster does not come up.
HELP
}

wrong_use() {
    printf 'launch-ray.sh: %s\nTry: launch-ray.sh --help\n' "$1" >&2
    exit 2
}

# Under SLURM this file runs as a copy; the folder that sbatch was called in is then the project's.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -e $here/grpo-async.py && -n ${SLURM_SUBMIT_DIR:-} ]]; then
    here=$SLURM_SUBMIT_DIR/sota-implementations/grpo
fi
folder=$PWD hosts='' address='' port=6379 venv=${VIRTUAL_ENV:-} script=$here/grpo-async.py timeout=300 is_dry=false

while (($#)); do
    case $1 in
        --hosts | --address | --port | --venv | --script | --timeout)
            [[ $# -ge 2 && $2 != --* ]] || wrong_use "$1 needs a value"
            printf -v "${1#--}" '%s' "$2"
            shift 2
            ;;
        --dry-run) is_dry=true && shift ;;
        --help | -h) usage && exit 0 ;;
        --) shift && break ;;
        *) wrong_use "there is no option '$1' (overrides of the script come after --)" ;;
    esac
done
for number in "$port" "$timeout"; do # bash would read a number with a leading zero as octal
    [[ $number =~ ^[1-9][0-9]*$ ]] || wrong_use "--port and --timeout are numbers such as 300, got '$number'"
done
[[ -e $script ]] || wrong_use "there is no script '$script'; run this in the project's folder, or give --script"

others=()
if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
    [[ -z $hosts ]] || wrong_use "--hosts is given, and SLURM has allocated machines already"
    mapfile -t others < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    first=${others[0]}
    [[ $first == "$(hostname -s)" ]] || wrong_use "run this on the allocation's first machine, $first: use sbatch"
    others=("${others[@]:1}")
elif [[ -n $hosts ]]; then
    [[ $hosts =~ ^[^,[:space:]]+(,[^,[:space:]]+)*$ ]] || wrong_use "--hosts is HOST[,HOST…], got '$hosts'"
    IFS=, read -ra others <<<"$hosts"
else
    wrong_use "--hosts is needed outside of a SLURM allocation"
fi
num_machines=$((${#others[@]} + 1))
if [[ -z $address ]]; then
    read -r address _ < <(hostname -I) || wrong_use "this machine has no address; give --address"
fi
cluster=$address:$port

head_command=(ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false
    --disable-usage-stats --block)
worker_command=(ray start --address="$cluster" --disable-usage-stats --block)
training_command=(python "$script" hardware=ray-cluster "ray.address=$cluster" "$@")

# What runs on another machine: the first line of its input is Ray's token, the end of its input is the end of Ray.
on_host() {
    local steps
    printf -v steps 'IFS= read -r RAY_AUTH_TOKEN; export RAY_AUTH_TOKEN RAY_AUTH_MODE=token; cd %q && ' "$folder"
    [[ -z $venv ]] || printf -v steps '%s. %q && ' "$steps" "$venv/bin/activate"
    printf -v steps '%s{ %s </dev/null & cat >/dev/null; kill $!; wait; }' "$steps" "${worker_command[*]}"
    printf 'exec bash -c %q' "$steps"
}

if $is_dry; then
    printf 'here: %s\n' "${head_command[*]}"
    for host in "${others[@]}"; do
        if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
            printf '%s: srun --overlap --nodes=1 --ntasks=1 --nodelist=%s %s\n' "$host" "$host" "${worker_command[*]}"
        else
            printf '%s: ssh %s %s\n' "$host" "$host" "$(on_host)"
        fi
    done
    printf 'when %s machines are there: %s\n' "$num_machines" "${training_command[*]}"
    exit 0
fi

RAY_AUTH_TOKEN=$(ray get-auth-token --generate)
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

set -m # each job is a process group of its own, which is ended as one
head_job='' worker_jobs=()
# shellcheck disable=SC2317  # the trap calls it
end_ray() {
    trap - EXIT
    for job in "${worker_jobs[@]}"; do
        kill -- "-$job" || true
    done
    # Ray's own command ends what it has started, in order; its group would die all at once.
    [[ -z $head_job ]] || kill "$head_job" || true
    wait
} 2>/dev/null
trap end_ray EXIT
trap 'exit 130' INT TERM

log=$(mktemp -d)
"${head_command[@]}" >"$log/here" 2>&1 &
head_job=$!
for host in "${others[@]}"; do
    if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
        srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" "${worker_command[@]}" >"$log/$host" 2>&1 &
    else
        # The token does not go on a command line, where others of that machine could read it.
        # shellcheck disable=SC2029  # on_host is meant to be made here
        { printf '%s\n' "$RAY_AUTH_TOKEN" && sleep infinity; } | ssh "$host" "$(on_host)" >"$log/$host" 2>&1 &
    fi
    worker_jobs+=("$(jobs -p %%)")
done

count='import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))'
deadline=$((SECONDS + timeout)) num_there=0
until [[ $num_there == "$num_machines" ]]; do
    if ((SECONDS >= deadline)); then
        printf 'launch-ray.sh: %s of %s machines came in %s s; their logs:\n' "$num_there" "$num_machines" "$timeout"
        tail -n 5 "$log"/* || true
        exit 1
    fi >&2
    sleep 1
    num_there=$(python -c "$count" "$cluster" 2>/dev/null | tail -n 1) || num_there=0
done
printf 'Ray runs on %s machines at %s; logs are in %s\n' "$num_machines" "$cluster" "$log"

status=0
"${training_command[@]}" || status=$?
exit "$status"

#!/usr/bin/env bash
# The test suite's part for a GPU, and the paper's workloads, on a machine with one CUDA GPU, PyTorch 2.11 or newer and no network.
#
#   benchmarks/gpu.sh [WHEELS] [OUT]
#
# WHEELS: a folder with wheels of what PYTHON has not: ortools, click, rich, numpy, pytest, and what these need; for the workloads
# of transformers also that. OUT: a new or empty folder for what is written (gpu-results). It ends within MINUTES.
#
#   PYTHON=python3   the interpreter that has PyTorch
#   MINUTES=8        for everything
#   REHEARSE=1       no GPU: the same on the CPU, in small sizes
#
# A short table comes last; OUT/gpu.json has everything. Exit code: 0, 1 if a test failed or a part gave no result, 2 for a machine
# or a folder that won't do.

set -u -o pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 2
wheels=${1:-}
out=${2:-gpu-results}
python=${PYTHON:-python3}
minutes=${MINUTES:-8}
rehearse=${REHEARSE:-}
began=$SECONDS

die() { echo "gpu.sh: $*" >&2; exit 2; }
left() { echo $((60 * minutes - (SECONDS - began))); }
say() { echo "[$((SECONDS - began)) s] $*"; }

[[ $minutes =~ ^[0-9]+$ && $minutes -ge 3 ]] || die "MINUTES=$minutes: must be a whole number from 3 on"
[[ -z $wheels || -d $wheels ]] || die "WHEELS $wheels: there is no such folder"
[[ ! -e $out || -d $out ]] || die "OUT $out: is not a folder"
if [[ -d $out && -n $(ls -A "$out") ]]; then die "OUT $out: is not empty"; fi
mkdir -p "$out" || die "OUT $out: can't be made"
out=$(cd "$out" && pwd)
[[ -z $wheels ]] || wheels=$(cd "$wheels" && pwd)
command -v "$python" >/dev/null || die "PYTHON $python: not found"

device=cuda preset=paper
[[ -z $rehearse ]] || device=cpu preset=small
export TORCH_ECHO_TEST_DEVICE=$device TORCH_ECHO_CACHE=$out/costs TORCH_ECHO="" KINETO_LOG_LEVEL=99 PYTHONDONTWRITEBYTECODE=1
[[ -z $rehearse ]] || export OMP_NUM_THREADS=1

# --- the interpreter, with what is missing from the wheels -------------------------------------------------------------------

"$python" - "$device" <<'EOF' || exit 2
import sys
try:
    import torch
except ImportError as error:
    sys.exit(f"gpu.sh: this Python has no PyTorch: {error}")
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if version < (2, 11):
    sys.exit(f"gpu.sh: PyTorch {torch.__version__} is older than 2.11")
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("gpu.sh: PyTorch sees no GPU; REHEARSE=1 runs the same on the CPU")
name = torch.cuda.get_device_name() if sys.argv[1] == "cuda" else "CPU"
print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, {name}")
EOF

missing=$("$python" - <<'EOF'
from importlib.util import find_spec
print(*(name for name in ("ortools", "click", "rich", "numpy", "pytest") if find_spec(name) is None))
EOF
) || exit 2
if [[ -n $missing ]]; then
    [[ -n $wheels ]] || die "this Python has no $missing: give a folder of wheels"
    say "installing $missing"
    "$python" -m venv "$out/env" >"$out/install.log" 2>&1 || die "no virtual environment can be made (see $out/install.log)"
    # Its own packages, and those of PYTHON, which may itself be in a virtual environment.
    "$python" - "$out/env" <<'EOF' || exit 2
import subprocess, sys, sysconfig
from pathlib import Path
env = Path(sys.argv[1])
own = subprocess.run([env / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                     capture_output=True, text=True, check=True).stdout.strip()
standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
theirs = [p for p in sys.path if p and Path(p).is_dir() and p not in standard and not p.endswith("lib-dynload")]
Path(own, "base.pth").write_text("".join(f"{p}\n" for p in theirs))
EOF
    # shellcheck disable=SC2086
    "$out/env/bin/python" -m pip install --no-index --find-links "$wheels" $missing >>"$out/install.log" 2>&1 ||
        die "$missing can't be installed from $wheels (see $out/install.log)"
    python=$out/env/bin/python
fi
export PYTHONPATH=$root/src:$root${PYTHONPATH:+:$PYTHONPATH}
cd "$root" || exit 2
"$python" -c 'import torch_echo.api, pytest' || die "torch-echo can't be imported"

# --- the tests -----------------------------------------------------------------------------------------------------------------

guard=$((60 * minutes * 3 / 10))
say "tests, $guard s at most"
TORCH_ECHO_TEST_SECONDS=$((guard - 30)) timeout --kill-after=10 "$guard" "$python" -m pytest tests/test_cuda.py -m cuda -p no:xdist --junitxml "$out/tests.xml" \
    >"$out/tests.log" 2>&1
tests=$?
tail -n 1 "$out/tests.log"

# --- predictions, while the GPU measures -----------------------------------------------------------------------------------------

names=(nmt resnet152 transformer_base deepspeech)
workloads=()
for name in "${names[@]}"; do workloads+=(--workload "$name"); done
guard=$(($(left) - 20))
timeout --kill-after=5 "$guard" "$python" -m benchmarks.predicted --preset "$preset" --device "$device" "${workloads[@]}" \
    --jobs "$([[ -z $rehearse ]] && echo 4 || echo 1)" --out "$out/predicted.json" >"$out/predicted.log" 2>&1 &
predicting=$!

# --- the workloads -------------------------------------------------------------------------------------------------------------

guard=$(($(left) - 30))
say "workloads, $guard s at most"
minutes_left=$("$python" -c "print(max(0.5, ($guard - 45) / 60))")
timeout --kill-after=10 "$guard" "$python" -m benchmarks --preset "$preset" --device "$device" --minutes "$minutes_left" \
    --system tape:0.05 --system tape:0.15 "${workloads[@]}" --out "$out" >"$out/bench.log" 2>&1
bench=$?
wait "$predicting"
predicted=$?

# --- all of it -------------------------------------------------------------------------------------------------------------------

"$python" -m benchmarks.gpu_report "$out" --tests "$tests" --bench "$bench" --predicted "$predicted" --seconds "$((SECONDS - began))"

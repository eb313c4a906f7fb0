#!/usr/bin/env bash
# make_venv.sh DIR: a virtual environment with the real vLLM for CPUs and, editable, this Ecotone. About 2.5 GB.
# The versions are those of constraints.txt beside this script, all of them and no others.
set -euo pipefail
dir=${1:?usage: make_venv.sh DIR}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

test -x "$dir/bin/python" || "${PYTHON:-python3}" -m venv "$dir"
python="$dir/bin/python"
"$python" -m pip install -q --disable-pip-version-check --no-deps -r "$here/constraints.txt"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$here/torchvision_ops.py" "$site/_torchvision_ops.py"
echo 'import _torchvision_ops' > "$site/_torchvision_ops.pth"
"$python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e "$root"
"$python" -c 'import torchvision, vllm; print("vLLM", vllm.__version__)'

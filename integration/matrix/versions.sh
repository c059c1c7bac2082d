#!/bin/sh
# Prints the versions that stories run with: Debian's newest suite changes.
#   versions.sh DIR       DIR is what fetch.sh made; BINDGUARD_CONTAINERD replaces programs of the newest suite
set -eu
for suite in bookworm trixie sid; do
  line=
  for program in containerd runc crun; do
    path=$1/v/$suite/bin/$program
    own=${BINDGUARD_CONTAINERD:-}/$program
    if [ "$suite" = sid ] && [ -x "$own" ]; then path=$own; fi
    line="$line $("$path" --version | head -n 1 | sed 's/^containerd [^ ]* \([^ ]*\).*/containerd \1/; s/ version//'),"
  done
  echo "$suite:${line%,}"
done
echo "experimental: $("$1/v/experimental/bin/runc" --version | head -n 1 | sed 's/ version//')"

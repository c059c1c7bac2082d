#!/bin/sh
# Prints the versions that stories run with: Debian's newest suite changes.
#   versions.sh DIR       DIR is what fetch.sh and go.sh made; BINDGUARD_CONTAINERD replaces programs of the newest containerd
set -eu
for folder in trixie sid containerd-2.3 containerd-2.4; do
  [ -d "$1/v/$folder" ] || continue
  line=
  for program in containerd runc crun; do
    path=$1/v/$folder/bin/$program
    own=${BINDGUARD_CONTAINERD:-}/$program
    if [ "$folder" = containerd-2.4 ] && [ -x "$own" ]; then path=$own; fi
    line="$line $("$path" --version | head -n 1 | sed 's/^containerd [^ ]* \([^ ]*\).*/containerd \1/; s/ version//'),"
  done
  echo "$folder:${line%,}"
done

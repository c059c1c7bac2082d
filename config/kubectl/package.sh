#!/bin/sh
# Packs the plugin for a release: an archive, and krew's manifest with the archive's digest.
#   package.sh VERSION DIR
# SOURCE_DATE_EPOCH: the time of the files. The same plugin gives the same bytes.
set -eu
version=$1 dir=$2
here=$(cd "$(dirname "$0")" && pwd)
name=kubectl-bindguard-$version.tar.gz
tar --create --gzip --sort=name --owner=0 --group=0 --numeric-owner --mode='u=rwX,go=rX' --mtime="@${SOURCE_DATE_EPOCH:-0}" --file "$dir/$name" \
  --directory "$here" kubectl-bindguard --directory "$here/../.." LICENSE
digest=$(sha256sum "$dir/$name" | cut -d ' ' -f 1)
sed "/^#/d; s/@VERSION@/$version/g; s/@SHA256@/$digest/" "$here/krew.yaml" >"$dir/kubectl-bindguard.yaml"

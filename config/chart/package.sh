#!/bin/sh
# Packs the chart of a release: it names the image by the digest of the image's index, unless the values have a tag or a digest.
#   package.sh HELM IMAGE DIR     IMAGE is the OCI archive of the image
# The same chart gives the same bytes: SOURCE_DATE_EPOCH is the time of every file. (helm writes the time of the day.)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
digest=$(tar --extract --to-stdout --file "$2" index.json | jq --raw-output '.manifests[0].digest')
case $digest in
  sha256:*) ;;
  *) echo "pack the chart: index.json of $2 has no digest" >&2; exit 1 ;;
esac
mkdir "$work/packed" "$work/unpacked"
cp -R "$here" "$work/bindguard"
sed -i "/^annotations:/a \\  bindguard.io/image-digest: $digest" "$work/bindguard/Chart.yaml"
"$1" package --destination "$work/packed" "$work/bindguard" >/dev/null
package=$(basename "$work"/packed/*.tgz)
tar --extract --touch --file "$work/packed/$package" --directory "$work/unpacked"
tar --create --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime="@${SOURCE_DATE_EPOCH:-0}" \
  --directory "$work/unpacked" bindguard | gzip --no-name > "$3/$package"

#!/bin/sh
# Writes the image of config/image/Dockerfile as an OCI archive from built programs, without a container engine. With the programs
# of several architectures the image is an index.
#   archive.sh NAME REVISION FILE ARCHITECTURE DIR...     such as: archive.sh bindguard-node:1.0.0 4f2a... image.tar arm64 target/arm64/...
# NAME is the image's name after `ctr images import`. The same programs give the same bytes: SOURCE_DATE_EPOCH is the time of
# every file.
set -eu
name=$1 revision=$2 file=$3; shift 3
here=$(cd "$(dirname "$0")" && pwd)
time=${SOURCE_DATE_EPOCH:-0}
created=$(date --utc --date="@$time" +%Y-%m-%dT%H:%M:%SZ)
url=$(sed -n 's/^repository = "\(.*\)"/\1/p' "$here/../../Cargo.toml")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/archive/blobs/sha256"

# The arguments are a tar file's name, a folder and the files in it.
pack() {
  to=$1 from=$2; shift 2
  tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$time" --file "$to" --directory "$from" "$@"
}
digest() { sha256sum "$1" | cut -d ' ' -f 1; }
# Moves a file to the blobs, and prints its descriptor without the closing brace.
blob() {
  hash=$(digest "$2")
  printf '{"mediaType":"application/vnd.oci.image.%s","digest":"sha256:%s","size":%s' "$1" "$hash" "$(stat --format=%s "$2")"
  mv "$2" "$work/archive/blobs/sha256/$hash"
}
# The keys of org.opencontainers.image, for the config of an image and for the index.
labels() {
  key=org.opencontainers.image
  printf '{"%s.created":"%s","%s.licenses":"Apache-2.0","%s.revision":"%s","%s.source":"%s","%s.title":"bindguard","%s.version":"%s"}' \
    $key "$created" $key $key "$revision" $key "$url" $key $key "${name##*:}"
}

manifests=
while [ $# -gt 0 ]; do
  architecture=$1 programs=$2; shift 2
  rm -rf "$work/layer"
  mkdir -p "$work/layer/usr/local/bin"
  for program in containerd-shim-bindguard-v2 bindguard-runtime bindguard bindguard-agent; do
    install -m 0755 "$programs/$program" "$work/layer/usr/local/bin/"
  done
  pack "$work/layer.tar" "$work/layer" usr
  unpacked=$(digest "$work/layer.tar")
  gzip --no-name "$work/layer.tar"
  layer=$(blob layer.v1.tar+gzip "$work/layer.tar.gz")}
  {
    printf '{"created":"%s","architecture":"%s","os":"linux","config":{"Env":["PATH=/usr/local/bin"],' "$created" "$architecture"
    printf '"Cmd":["bindguard","--help"],"Labels":%s},' "$(labels)"
    printf '"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' "$unpacked"
  } > "$work/config"
  config=$(blob config.v1+json "$work/config")}
  printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":%s,"layers":[%s]}' \
    "$config" "$layer" > "$work/manifest"
  manifests="$manifests${manifests:+,}$(blob manifest.v1+json "$work/manifest"),\"platform\":{\"architecture\":\"$architecture\",\"os\":\"linux\"}}"
done
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[%s],"annotations":%s}' \
  "$manifests" "$(labels)" > "$work/index"
printf '{"schemaVersion":2,"manifests":[%s,"annotations":{"%s":"%s","%s":"%s"}}]}' \
  "$(blob index.v1+json "$work/index")" io.containerd.image.name "$name" org.opencontainers.image.ref.name "${name##*:}" \
  > "$work/archive/index.json"
printf '{"imageLayoutVersion":"1.0.0"}' > "$work/archive/oci-layout"
pack "$file" "$work/archive" blobs index.json oci-layout

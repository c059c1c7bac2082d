#!/bin/sh
# Writes a CycloneDX file beside each artefact of a release, and the checksums of all files.
#   release.sh DIR SBOM VERSION     SBOM is the CycloneDX file of the programs; each artefact but the chart has these components
set -eu
cd "$1"
for artefact in *; do
  case $artefact in
    *.tgz) kind=application components='[]' ;;
    *.oci.tar) kind=container components=.components ;;
    *) kind=application components=.components ;;
  esac
  hash=$(sha256sum "$artefact" | cut -d ' ' -f 1)
  jq --arg name "$artefact" --arg version "$3" --arg kind "$kind" --arg hash "$hash" \
    ".metadata.component = {type: \$kind, name: \$name, version: \$version, hashes: [{alg: \"SHA-256\", content: \$hash}]}
     | .components = $components | if .components == [] then .dependencies = [] else . end" "$2" > ".$artefact.cdx.json"
done
for sbom in .*.cdx.json; do mv "$sbom" "${sbom#.}"; done
sha256sum -- * > SHA256SUMS

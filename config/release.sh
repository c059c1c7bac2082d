#!/bin/sh
# Writes a CycloneDX file beside each artefact of a release, a statement of the artefacts' origin, and the checksums of all files.
#   release.sh DIR SBOM VERSION     SBOM is the CycloneDX file of the programs; each artefact but the chart has these components
# The statement is in-toto's with the predicate of SLSA 1.0, https://slsa.dev/spec/v1.0/provenance. The statement has no signature.
# In GitHub Actions the workflow is the builder. The same build gives the same bytes: no file has the time of the day, a random
# number or the user of the machine, as cargo-sbom writes them.
set -eu
repository=$(cd "$(dirname "$0")/.." && pwd)
cd "$1"
statement=bindguard-$3-$(uname -m).provenance.json
digests=$(sha256sum -- *)
for artefact in *; do
  case $artefact in
    *.tgz | kubectl-bindguard*) kind=application components='[]' ;;
    *.oci.tar) kind=container components=.components ;;
    *) kind=application components=.components ;;
  esac
  hash=$(sha256sum "$artefact" | cut -d ' ' -f 1)
  jq --arg name "$artefact" --arg version "$3" --arg kind "$kind" --arg hash "$hash" --argjson time "${SOURCE_DATE_EPOCH:-0}" \
    "del(.serialNumber, .metadata.authors) | .metadata.timestamp = (\$time | todate)
     | .components |= sort_by(.[\"bom-ref\"]) | .dependencies |= (map(if .dependsOn then .dependsOn |= sort else . end) | sort_by(.ref))
     | .metadata.component = {type: \$kind, name: \$name, version: \$version, hashes: [{alg: \"SHA-256\", content: \$hash}]}
     | .components = $components | if .components == [] then .dependencies = [] else . end" "$2" > ".$artefact.cdx.json"
done
for sbom in .*.cdx.json; do mv "$sbom" "${sbom#.}"; done

jq --null-input --arg digests "$digests" --arg version "$3" --arg revision "${BINDGUARD_REVISION:-}" \
  --arg source "${GITHUB_REPOSITORY:+git+$GITHUB_SERVER_URL/$GITHUB_REPOSITORY}" \
  --arg builder "${GITHUB_WORKFLOW_REF:+$GITHUB_SERVER_URL/$GITHUB_WORKFLOW_REF}" \
  --arg lock "$(sha256sum "$repository/Cargo.lock" | cut -d ' ' -f 1)" --arg rustc "$(rustc --version)" \
  --arg epoch "${SOURCE_DATE_EPOCH:-}" '{
    _type: "https://in-toto.io/Statement/v1",
    subject: [$digests | split("\n")[] | capture("^(?<sha256>[0-9a-f]+)  (?<name>.*)$") | {name, digest: {sha256}}],
    predicateType: "https://slsa.dev/provenance/v1",
    predicate: {
      buildDefinition: {
        buildType: "urn:bindguard:make-release:1",
        externalParameters: {target: "release", version: $version},
        internalParameters: {rustc: $rustc, SOURCE_DATE_EPOCH: $epoch},
        resolvedDependencies: [
          ({name: "source", uri: (if $source == "" then "urn:bindguard:source" else $source end)}
            + if $revision == "" then {} else {digest: {gitCommit: $revision}} end),
          {name: "Cargo.lock", digest: {sha256: $lock}}
        ]
      },
      runDetails: {builder: {id: (if $builder == "" then "urn:bindguard:by-hand" else $builder end)}}
    }
  }' > "$statement"
sha256sum -- * > SHA256SUMS

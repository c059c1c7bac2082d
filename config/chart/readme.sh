#!/bin/sh
# Prints the chart's README.md, with a row for each value of values.yaml: sh config/chart/readme.sh > config/chart/README.md
set -eu
cd "$(dirname "$0")"
home=$(sed -n 's/^home: //p' Chart.yaml)
cat <<EOF
# bindguard

$(sed -n 's/^description: //p' Chart.yaml)

[The page about fleets]($home/blob/main/docs/fleet.md) covers the image, a canary, an upgrade, a rollback and the removal. The chart requires \`image.registry\`; every other value has a default.

## Values

| value | default | |
|---|---|---|
EOF
awk '
  function row() {
    if (key != "") { gsub(/\|/, "\\|", text); printf "| `%s` | `%s` | %s |\n", key, value == "" ? "{}" : value, text }
    key = ""
  }
  /^ *#/ { line = $0; sub(/^ *# ?/, "", line); note = note (note == "" ? "" : " ") line; next }
  /^$/ { note = ""; next }
  /^ *- / { item = $0; sub(/^ *- */, "", item); value = value (value == "" ? "" : ", ") item; next }
  {
    level = (match($0, /[^ ]/) - 1) / 2
    name = $0; sub(/^ */, "", name); rest = name
    sub(/:.*/, "", name); sub(/^[^:]*: */, "", rest)
    if (rest == name ":") rest = ""
    path[level] = name; full = path[0]
    for (i = 1; i <= level; i++) full = full "." path[i]
    # A group has no row; its comment is in the row of its first value.
    if (key != "" && index(full, key ".") == 1) { note = text (text != "" && note != "" ? " " : "") note; key = "" }
    row()
    key = full; value = rest; text = note; note = ""
  }
  END { row() }
' values.yaml

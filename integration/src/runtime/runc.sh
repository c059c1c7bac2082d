#!/bin/sh
# The runc of a node whose story wants a say: keeps each call's arguments, and does to the next call of a verb what was laid
# out for it in FOLDER/VERB (one line: what, and after how many seconds). Then it becomes the real runtime.
real=@REAL@ folder=@FOLDER@
verb=none
for word; do
  case $word in create | start | exec | delete | kill | ps | pause | resume | update | checkpoint | restore) verb=$word; break ;; esac
done
echo "$*" >> "$folder/calls"
# taken by one call only, even if others come at the same time
mv "$folder/$verb" "$folder/taken.$$" 2>/dev/null || exec "$real" "$@"
read -r what seconds < "$folder/taken.$$"
rm "$folder/taken.$$"

hold() {
  : > "$folder/called"
  # for ever, as far as its story is concerned
  tries=0; while [ ! -e "$folder/go" ] && [ $tries -lt 30000 ]; do sleep 0.01; tries=$((tries + 1)); done
  [ ! -s "$folder/go" ] || exit 1
}
log() {
  before=; for word; do [ "$before" != --log ] || printf '{"level":"error","msg":"half a li' > "$word"; before=$word; done
}
edit() {
  before=; for word; do [ "$before" != --bundle ] || bundle=$word; before=$word; done
  cp "$bundle/config.json" "$bundle/config.json.true" && sed -i "$seconds" "$bundle/config.json"
}
case $what in
  hold) hold ;;
  hold-after) "$real" "$@"; status=$?; hold; exit $status ;;
  # the subshell's $$ is the process that becomes the runtime, and its $PPID the shim
  kill-it) (sleep "$seconds"; kill -9 $$) & ;;
  kill-it-after) "$real" "$@"; kill -9 $$ ;;
  kill-shim) (sleep "$seconds"; kill -9 $PPID) & ;;
  kill-shim-after) "$real" "$@"; status=$?; kill -9 $PPID; exit $status ;;
  garble-the-log) log "$@"; echo "what it says itself" >&2; exit 1 ;;
  only-record) exit 1 ;;
  edit-spec) edit "$@"; "$real" "$@"; status=$?; mv "$bundle/config.json.true" "$bundle/config.json"; exit $status ;;
  rewrite-spec) edit "$@" && rm "$bundle/config.json.true" ;;
  *) echo "runc.sh: $verb: what is $what?" >&2; exit 1 ;;
esac
exec "$real" "$@"

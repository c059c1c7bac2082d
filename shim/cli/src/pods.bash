
# The names of pods, and everything else as above.
_bindguard_pods() {
    bindguard diagnose --all --json 2>/dev/null |
        sed -n '/"pod": {/,/}/s/.*"name": "\([a-z0-9.-]*\)".*/\1/p' | sort -u
}
_bindguard_with_pods() {
    _bindguard "$@"
    local word="${COMP_WORDS[COMP_CWORD]}" pods
    case "${COMP_WORDS[COMP_CWORD-1]} $word" in
        "--pod "*) pods="$(_bindguard_pods)" ;;
        *" p"*) pods="$(_bindguard_pods | sed 's,^,pod/,')" ;;
        *) return ;;
    esac
    COMPREPLY+=($(compgen -W "$pods" -- "$word"))
}
complete -F _bindguard_with_pods -o nosort -o bashdefault -o default bindguard

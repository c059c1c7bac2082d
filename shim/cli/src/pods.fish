
# The names of pods.
function __bindguard_pods
    bindguard diagnose --all --json 2>/dev/null |
        sed -n '/"pod": {/,/}/s/.*"name": "\([a-z0-9.-]*\)".*/\1/p' | sort -u
end
complete -c bindguard -n "__fish_seen_subcommand_from diagnose repair refresh journal" -l pod -x -a "(__bindguard_pods)"
complete -c bindguard -n "__fish_seen_subcommand_from diagnose repair refresh journal" -a "(__bindguard_pods | sed 's,^,pod/,')"

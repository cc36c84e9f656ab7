# Runs one rank behind ssh. The launcher sends it over the standard input, after the functions that say what
# to run, and all of it inside one pair of braces: cut short by a lost connection it runs nothing.
#
# What follows on the standard input: for rank 0 its input, as lines that hold a length, each followed by so
# many bytes, 0 being the end of it. The end of the file means that the launcher, or its ssh, is gone: then
# everything in this process group is ended. The group is that of the whole session, which sshd has made.
#
# Descriptors: 3 the launcher's messages, 4 the standard error (the shell's own remarks go nowhere), 5 the
# rank's input, 9 the secret. A line on 4 that begins with the mark is for the launcher.

raccl_say() {
    printf '%s%s\n' "$raccl_mark" "$1" >&4
}

raccl_end_group() {
    exec >/dev/null
    trap '' HUP INT TERM
    kill -TERM -$$
    kill -CONT -$$
    # The launcher may have this group too, and need not wait for us.
    trap - TERM
    sleep 1
    kill -KILL -$$
}

raccl_copy() {
    if [ "$raccl_whole" = yes ]; then
        dd bs="$1" count=1 iflag=fullblock
    else
        # Elsewhere a byte at a time is the one way to read exactly so many.
        dd ibs=1 obs=65536 count="$1"
    fi
}

raccl_listen() {
    # With exec, since a shell keeps copies of what it redirects for a function only, and what outlives the
    # rank for a moment must not keep the connection.
    exec <&3 3<&- 4>&-
    trap '' HUP INT TERM
    raccl_whole=no
    if dd count=0 iflag=fullblock </dev/null; then raccl_whole=yes; fi
    while IFS= read -r raccl_length; do
        case $raccl_length in
        0) exec >/dev/null ;;
        *)
            raccl_copy "$raccl_length" || {
                # The rank does not read any more.
                exec >/dev/null
                cat
            }
            ;;
        esac
    done
    raccl_end_group &
}

raccl_run() {
    # Gentle words to the group are for the rank.
    trap : HUP INT TERM
    if [ "$raccl_input" = no ]; then exec </dev/null; fi
    exec 5<&0
    printf '%s\n' "$raccl_secret" | (
        exec 9<&0 0<&5 5<&-
        trap - HUP INT TERM
        raccl_environment 2>&4
        if ! command -v "$1" >/dev/null; then
            raccl_say missing
            exit 127
        fi
        exec 2>&4 3<&- 4>&-
        exec "$@"
    )
    raccl_say "ended $?"
}

trap : HUP INT TERM
exec 3<&0 4>&2 </dev/null 2>/dev/null
unset CDPATH
if ! cd -- "$raccl_directory"; then
    if [ "$raccl_elsewhere" = no ]; then
        raccl_say "no directory"
        exit 1
    fi
    printf 'raccl: %s is not a directory here; running in %s\n' "$raccl_directory" "$PWD" >&4
fi
raccl_say started
raccl_listen | raccl_run "$@"
exit 0

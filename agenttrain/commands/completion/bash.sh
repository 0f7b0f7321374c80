
_agenttrain() {
    local line=${COMP_LINE:0:COMP_POINT} current candidate before=
    local -a words
    # Not COMP_WORDS, which bash cuts at = and :
    read -ra words <<<"$line"
    case $line in
        *[[:space:]]) current= ;;
        *)
            current=${words[${#words[@]} - 1]}
            unset "words[${#words[@]}-1]"
            ;;
    esac
    case $current in
        [\'\"]*) current=${current#?} ;; # within quotes the word is one
        *=*)
            # Bash replaces only what follows the last = of the word.
            case $COMP_WORDBREAKS in
                *=*) before=${current%"${current##*=}"} ;;
            esac
            ;;
    esac
    COMPREPLY=()
    while read -r candidate; do
        candidate=${candidate#"$before"}
        case $candidate in
            *[=./,[] | *\[*) ;;
            *) candidate+=' ' ;;
        esac
        COMPREPLY+=("$candidate")
    done < <(_agenttrain_candidates "$current" "${words[@]:1}")
    if _agenttrain_has_values "${words[${#words[@]} - 1]}"; then
        compopt +o default 2>/dev/null # no files; bash 3 has no compopt
        return
    fi
    case " _AGENTTRAIN_FOLDERS_ " in
        *" ${words[1]} "*)
            while read -r candidate; do
                COMPREPLY+=("$candidate/")
            done < <(compgen -d -- "$current")
            ;;
    esac
}
# Without a candidate bash offers files.
complete -o nospace -o default -F _agenttrain agenttrain

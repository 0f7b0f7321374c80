
_agenttrain() {
    local candidate
    local -a open closed before
    before=(${words[2,CURRENT-1]})
    for candidate in ${(f)"$(_agenttrain_candidates "$PREFIX" $before)"}; do
        case $candidate in
            *[=./,[] | *\[*) open+=("$candidate") ;;
            *) closed+=("$candidate") ;;
        esac
    done
    compadd -Q -S '' -a open
    compadd -Q -a closed
    if _agenttrain_has_values "$before[-1]"; then
        return
    fi
    case " _AGENTTRAIN_FOLDERS_ " in
        *" ${words[2]} "*) _files -/ ;;
        *) if ((!${#open} && !${#closed})); then
            compset -P '*='
            _files
        fi ;;
    esac
}
compdef _agenttrain agenttrain

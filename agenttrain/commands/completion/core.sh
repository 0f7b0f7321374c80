# Candidates for the word that is being completed, for bash and zsh alike.
# _agenttrain_data holds lines "<kind> <candidate>", which agenttrain writes above this.

# _agenttrain_match KIND PREFIX HEAD: print HEAD + every candidate of a kind that begins with PREFIX.
_agenttrain_match() {
    local kind candidate
    while read -r kind candidate; do
        if [ "$kind" = "$1" ]; then
            case $candidate in
                "$2"*) printf '%s\n' "$3$candidate" ;;
            esac
        fi
    done <<<"$_agenttrain_data"
}

# _agenttrain_has_values WORD: succeed if the word is an option whose values are all known.
_agenttrain_has_values() {
    case $1 in
        -*) case " _AGENTTRAIN_VALUE_OPTIONS_ " in
            *" $1 "*) return 0 ;;
        esac ;;
    esac
    return 1
}

# _agenttrain_candidates WORD [the words before it]: print the candidates, each on a line.
# One that ends in = . or /, or an open list, goes on; nothing is printed where files are offered.
_agenttrain_candidates() {
    local current=$1 verb= folder= before= word mark bare key value head file
    shift
    for word in "$@"; do
        case $before in
            --config-dir | -cd) folder=$word ;;
            *) case $word in
                -* | *=*) ;;
                *) verb=${verb:-$word} ;;
            esac ;;
        esac
        before=$word
    done
    case $before in
        -*) case " _AGENTTRAIN_FILE_OPTIONS_ " in
            *" $before "*) return ;;
        esac ;;
    esac
    if [ -z "$verb" ] && ! _agenttrain_has_values "$before"; then
        _agenttrain_match verb "$current" ""
    fi
    verb=${verb:-train}
    if _agenttrain_has_values "$before"; then
        _agenttrain_match "value:$verb:$before" "$current" ""
        return
    fi
    mark=${current%%[!+~]*}
    bare=${current#"$mark"}
    case $bare in
        -*)
            _agenttrain_match "own:$verb" "$bare" ""
            _agenttrain_match option "$bare" ""
            ;;
        *=*)
            key=${bare%%=*}
            value=${bare#*=}
            # Of a list only the last item is completed: tools=[sql,fin -> tools=[sql,final_answer
            head=
            case $value in
                *[[,]*)
                    head=${value%"${value##*[[,]}"}
                    value=${value##*[[,]}
                    ;;
            esac
            _agenttrain_match "value:$key" "$value" "$mark$key=$head"
            if [ -n "$folder" ] && [ -d "$folder/$key" ]; then
                # `find`, since a pattern without a match is an error in zsh.
                find "$folder/$key" -maxdepth 1 -name '*.yaml' 2>/dev/null | sort |
                    while read -r file; do
                        file=${file##*/}
                        case ${file%.yaml} in
                            "$value"*) printf '%s\n' "$mark$key=$head${file%.yaml}" ;;
                        esac
                    done
            fi
            ;;
        *)
            if [ -z "$mark" ]; then
                _agenttrain_match "own:$verb" "$bare" ""
            fi
            case $verb in
                _AGENTTRAIN_SETTINGS_)
                    case $bare in
                        *.*) _agenttrain_match key "$bare" "$mark" ;;
                        *) _agenttrain_match section "$bare" "$mark" ;;
                    esac
                    ;;
            esac
            ;;
    esac
}

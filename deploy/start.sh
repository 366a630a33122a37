#!/bin/sh
# Starts one peer of a network whose members share the folder MEETING at their first start. FOUNDERS and JOINERS are names.
#
# Each founder leaves its peer id there. The first of them writes the genesis once all ids are there, and an invitation for each
# joiner. No key leaves its own volume. Whoever can write into MEETING at that time can put founders of their own in.
set -eu
meeting=${MEETING:-/var/lib/meeting}
first=${FOUNDERS%% *}
genesis=$PEER_DATA_DIRECTORY/genesis

put() { # what comes in, under this name, whole or not at all
    cat > "$meeting/.$PEER_NAME.$1"
    mv "$meeting/.$PEER_NAME.$1" "$meeting/$1"
}

await() {
    until [ -s "$meeting/$1" ]; do sleep 1; done
}

found() { # the genesis, of all founders
    set --
    for name in $FOUNDERS; do
        await "$name.id"
        [ "$name" = "$PEER_NAME" ] || set -- "$@" --voter "$(cat "$meeting/$name.id")"
    done
    peer init --network "$NETWORK" "$@"
}

invite() { # every joiner, as soon as this peer answers
    for name in $JOINERS; do
        [ -s "$meeting/$name.invitation" ] && continue
        until invitation=$(peer invite 2> /dev/null); do sleep 1; done
        echo "$invitation" | put "$name.invitation"
    done
}

case " $FOUNDERS " in
*" $PEER_NAME "*)
    if [ ! -e "$genesis" ]; then
        id=$(peer identity)
        echo "$id" | put "$PEER_NAME.id"
        if [ "$PEER_NAME" = "$first" ]; then
            found
        else
            await genesis
            cp "$meeting/genesis" "$genesis.new"
            mv "$genesis.new" "$genesis"
        fi
    fi
    if [ "$PEER_NAME" = "$first" ]; then
        [ -s "$meeting/genesis" ] || put genesis < "$genesis"
        invite &
    fi
    ;;
*)
    if [ ! -e "$genesis" ]; then
        await "$PEER_NAME.invitation"
        exec peer join "$(cat "$meeting/$PEER_NAME.invitation")" --no-console
    fi
    ;;
esac
exec peer run --no-console

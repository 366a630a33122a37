/* The agreement core of consensus/pbft/replica.py at one height: PBFT, two phases, timeout certificates.

   HONEST voters run the rules; LIARS more are one set of keys without any rule. Two things keep the model small:

   - A link is a set of messages, not a queue. What an honest voter has signed stays readable for ever, and a voter may
     read it at any time or never: that is loss, delay, repetition and reordering at once.
   - A liar has always signed everything. Whoever counts signatures may count LIARS of them on top of those of honest
     voters, each time on another statement, another one for each reader. What a liar cannot do is sign for others: a
     certificate exists when enough honest voters signed too.

   So "a quorum of X" reads: honest voters who signed X, plus LIARS, are QUORUM.

   Two blocks are enough, because the rules only compare blocks for equality: paint every block but one of the two that
   are decided in one colour, and a run with many blocks is a run with two. */

#ifndef HONEST
#define HONEST 3
#endif
#ifndef LIARS
#define LIARS 1
#endif
#ifndef QUORUM
#define QUORUM 3
#endif
#ifndef VIEWS
#define VIEWS 2
#endif

#define LIAR 255 /* who leads a view whose leader keeps to no rule */
#define AT(voter, view) ((voter) * VIEWS + (view))
#define OF(view, block) ((view) * 2 + (block))

/* A prepare certificate is a number: 0 is none, then view by view, block by block. */
#define CERTIFICATE(view, block) (1 + OF(view, block))
#define VIEW_OF(certificate) (((certificate) - 1) / 2)
#define BLOCK_OF(certificate) (((certificate) - 1) % 2)

/* What honest voters have signed: bit b stands for block b. A timeout is 1 + the certificate that it names; 0: none. */
byte prepares[HONEST * VIEWS];
byte commits[HONEST * VIEWS];
byte timeouts[HONEST * VIEWS];
byte proposals[VIEWS]; /* of honest leaders */
byte leader[VIEWS];

/* What an honest voter is in, and the highest prepare certificate it holds. */
byte view[HONEST];
byte high[HONEST];
#ifdef BUG_AMNESIA
bit forgot[HONEST];
#endif

/* Signatures of honest voters on (view, block), counted. */
byte prepare_count[VIEWS * 2];
byte commit_count[VIEWS * 2];
bit started; /* the first block that is ever named is called 0: the two names are interchangeable */

/* Certificates ---------------------------------------------------------------------------------------------------- */

#ifdef BUG_DUPLICATES
#define LIES (2 * LIARS) /* one voter counted twice */
#else
#define LIES LIARS
#endif

#if defined(BUG_VIEW_UNSIGNED)
#define PREPARE_SIGNERS(v, b) (prepare_count[OF(0, b)] + prepare_count[OF(1, b)])
#else
#define PREPARE_SIGNERS(v, b) (prepare_count[OF(v, b)])
#endif
#if defined(BUG_PHASE_UNSIGNED)
#define COMMIT_SIGNERS(v, b) (prepare_count[OF(v, b)])
#else
#define COMMIT_SIGNERS(v, b) (commit_count[OF(v, b)])
#endif

#define IS_PREPARED(v, b) (PREPARE_SIGNERS(v, b) + LIES >= QUORUM)
#define IS_COMMITTED(v, b) (COMMIT_SIGNERS(v, b) + LIES >= QUORUM)
#define EXISTS(certificate) ((certificate) == 0 || IS_PREPARED(VIEW_OF(certificate), BLOCK_OF(certificate)))

/* (S5) The certificate beside a timeout, or in a timeout certificate, is at least as high as the one that is named. */
#define IS_ABOVE(certificate, other) ((certificate) > 0 && ((other) == 0 || VIEW_OF(certificate) > VIEW_OF(other)))
#define COVERS(certificate, other) ((certificate) == (other) || IS_ABOVE(certificate, other))

#if defined(BUG_FIRST_CERTIFICATE)
/* Any one certificate that a timeout names stands for all of them; none only if nobody names one. */
#define COUNTS(i, v, c) (timeouts[AT(i, v)] > 0 && ((c) > 0 || timeouts[AT(i, v)] == 1))
#else
#define COUNTS(i, v, c) (timeouts[AT(i, v)] > 0 && COVERS(c, timeouts[AT(i, v)] - 1))
#endif
#define GAVE_UP(i, v) (timeouts[AT(i, v)] > 0)

#if HONEST == 2
#define ALL2(p, x, y) (p(0, x, y) + p(1, x, y))
#define ALL1(p, x) (p(0, x) + p(1, x))
#elif HONEST == 3
#define ALL2(p, x, y) (p(0, x, y) + p(1, x, y) + p(2, x, y))
#define ALL1(p, x) (p(0, x) + p(1, x) + p(2, x))
#elif HONEST == 4
#define ALL2(p, x, y) (p(0, x, y) + p(1, x, y) + p(2, x, y) + p(3, x, y))
#define ALL1(p, x) (p(0, x) + p(1, x) + p(2, x) + p(3, x))
#elif HONEST == 5
#define ALL2(p, x, y) (p(0, x, y) + p(1, x, y) + p(2, x, y) + p(3, x, y) + p(4, x, y))
#define ALL1(p, x) (p(0, x) + p(1, x) + p(2, x) + p(3, x) + p(4, x))
#endif

/* There is a timeout certificate of view v whose highest prepare certificate is c. */
#define IS_ENDED(v, c) (ALL2(COUNTS, v, c) + LIES >= QUORUM)
/* There are a quorum's timeouts of view v, whatever they name. */
#define IS_OVER(v) (ALL1(GAVE_UP, v) + LIES >= QUORUM)

/* What must hold --------------------------------------------------------------------------------------------------- */

#if VIEWS == 2
#define DECIDED(b) (IS_COMMITTED(0, b) || IS_COMMITTED(1, b))
#else
#define DECIDED(b) (IS_COMMITTED(0, b) || IS_COMMITTED(1, b) || IS_COMMITTED(2, b))
#endif

inline check(v) {
    skip;
#ifdef AGREEMENT
    assert(!(DECIDED(0) && DECIDED(1)));
#endif
#ifdef ONE_CERTIFICATE
    assert(!(IS_PREPARED(v, 0) && IS_PREPARED(v, 1)));
    assert(!(IS_COMMITTED(v, 0) && IS_COMMITTED(v, 1)));
#endif
#ifdef REACH_VIEW_0
    assert(!(IS_COMMITTED(0, 0) && commit_count[OF(0, 0)] == HONEST));
#endif
#ifdef REACH_SILENT_LEADER
    /* Nobody prepared anything in view 0, whose leader lies; all honest voters commit in view 1, which an honest one leads. */
    assert(!(leader[0] == LIAR && leader[1] != LIAR && prepare_count[OF(0, 0)] + prepare_count[OF(0, 1)] == 0 &&
             commit_count[OF(1, 0)] == HONEST));
#endif
#ifdef REACH_CARRY_OVER
    /* Block 0 was prepared in view 0 and committed there by somebody; all that is decided is decided in view 1. */
    assert(!(commit_count[OF(0, 0)] == 1 && !IS_COMMITTED(0, 0) && leader[1] != LIAR && commit_count[OF(1, 0)] == HONEST));
#endif
}

/* Signing ---------------------------------------------------------------------------------------------------------- */

#ifdef BUG_AMNESIA
#define REMEMBERS(i) (!forgot[i])
#else
#define REMEMBERS(i) true
#endif
#define HAS(what, i, v) (what[AT(i, v)] > 0 && REMEMBERS(i))

#if VIEWS == 2
#define HAS_TIMED_OUT(i, v) ((HAS(timeouts, i, 1)) || ((v) == 0 && HAS(timeouts, i, 0)))
#else
#define HAS_TIMED_OUT(i, v) ((HAS(timeouts, i, 2)) || ((v) <= 1 && HAS(timeouts, i, 1)) || ((v) == 0 && HAS(timeouts, i, 0)))
#endif

#ifdef BUG_PREPARE_AFTER_TIMEOUT
#define MAY_PREPARE(i, v) true
#else
#define MAY_PREPARE(i, v) (!HAS_TIMED_OUT(i, v)) /* (S2) */
#endif
#ifdef BUG_COMMIT_AFTER_TIMEOUT
#define MAY_COMMIT(i, v) true
#else
#define MAY_COMMIT(i, v) (!HAS_TIMED_OUT(i, v)) /* (S2) */
#endif

#define SIGN(what, count, i, v, b) \
    if \
    :: (what[AT(i, v)] & (1 << (b))) == 0 -> \
        ONE(what[AT(i, v)]) \
        what[AT(i, v)] = what[AT(i, v)] | (1 << (b)); \
        count[OF(v, b)]++; \
        check(v) \
    :: else \
    fi
#ifdef ONE_SIGNATURE
#define ONE(slot) assert(slot == 0);
#else
#define ONE(slot)
#endif

inline give_up(i, v) {
    printf("voter %d gives up view %d and holds certificate %d\n", i, v, high[i]);
#ifdef BUG_FORGOTTEN_LOCK
    timeouts[AT(i, v)] = 1
#else
    timeouts[AT(i, v)] = 1 + high[i]
#endif
}

/* Choosing: scratch variables, zero again at the end of each atomic step */

byte block, certificate, target;

inline clear() {
    block = 0;
    certificate = 0;
    target = 0
}

inline choose_block() {
    if
    :: block = 0
    :: started -> block = 1
    fi
}

inline choose_certificate() {
    if
    :: certificate = 0
    :: certificate = 1
    :: certificate = 2
#if VIEWS > 2
    :: certificate = 3
    :: certificate = 4
#endif
    fi
}

/* (S3) What may be proposed in view v > 0 under a timeout certificate of v − 1 whose highest prepare certificate is c. */
#ifdef BUG_NO_CARRY_OVER
#define OBLIGES(c, b) true
#else
#define OBLIGES(c, b) ((c) == 0 || BLOCK_OF(c) == (b))
#endif
#ifdef BUG_STALE_TIMEOUTS
#define JUSTIFIES(c, v) (EXISTS(c) && (IS_ENDED((v) - 1, c) || ((v) == 2 && IS_ENDED(0, c))))
#else
#define JUSTIFIES(c, v) (EXISTS(c) && ((c) == 0 || VIEW_OF(c) < (v)) && IS_ENDED((v) - 1, c))
#endif

/* One honest voter: every step is one turn of consensus.Replica, written down and sent ------------------------------- */

proctype Voter(byte me) {
    do
    :: atomic { /* _propose: an honest leader, at most once; the certificate is the highest that it holds itself */
        leader[view[me]] == me && proposals[view[me]] == 0 && !HAS_TIMED_OUT(me, view[me]) ->
        choose_block();
        if
        :: view[me] == 0 || (JUSTIFIES(high[me], view[me]) && OBLIGES(high[me], block)) ->
            proposals[view[me]] = 1 << block;
            printf("voter %d proposes block %d in view %d\n", me, block, view[me]);
            started = 1
        :: else
        fi;
        clear()
    }
    :: atomic { /* _prepare what an honest leader proposed, or anything that a lying one could justify */
        !HAS(prepares, me, view[me]) && MAY_PREPARE(me, view[me]) ->
        choose_block();
        if
        :: leader[view[me]] != LIAR && proposals[view[me]] == (1 << block) ->
            printf("voter %d prepares block %d in view %d\n", me, block, view[me]);
            SIGN(prepares, prepare_count, me, view[me], block)
        :: leader[view[me]] == LIAR && view[me] == 0 ->
            started = 1;
            printf("voter %d prepares block %d in view %d\n", me, block, view[me]);
            SIGN(prepares, prepare_count, me, view[me], block)
        :: leader[view[me]] == LIAR && view[me] > 0 ->
            choose_certificate();
            if
            :: JUSTIFIES(certificate, view[me]) && OBLIGES(certificate, block) ->
                started = 1;
                printf("voter %d prepares block %d in view %d, justified by certificate %d\n", me, block, view[me], certificate);
                SIGN(prepares, prepare_count, me, view[me], block)
            :: else
            fi
        :: else
        fi;
        clear()
    }
    :: atomic { /* _adopt: any prepare certificate that exists and is higher than what is held; durable, (S4) */
        if
        :: choose_certificate()
        :: certificate = CERTIFICATE(VIEWS - 1, 0)
        :: certificate = CERTIFICATE(VIEWS - 1, 1)
        fi;
        if
        :: IS_ABOVE(certificate, high[me]) && EXISTS(certificate) -> high[me] = certificate
        :: else
        fi;
        clear()
    }
    :: atomic { /* _commit on a prepare certificate of one's own view */
        high[me] > 0 && VIEW_OF(high[me]) == view[me] && !HAS(commits, me, view[me]) && MAY_COMMIT(me, view[me]) ->
        block = BLOCK_OF(high[me]);
        printf("voter %d commits block %d in view %d\n", me, block, view[me]);
        SIGN(commits, commit_count, me, view[me], block);
        clear()
    }
    :: atomic { /* the view's timer, which may end at any time */
        !HAS(timeouts, me, view[me]) && timeouts[AT(me, view[me])] == 0 ->
        give_up(me, view[me]);
        clear()
    }
    :: atomic { /* _vouch: in a view, but without what shows why */
        view[me] > 0 && timeouts[AT(me, view[me] - 1)] == 0 && (high[me] == 0 || VIEW_OF(high[me]) < view[me]) ->
        give_up(me, view[me] - 1);
        clear()
    }
    :: atomic { /* _follow: a prepare certificate of a later view, or a quorum's timeouts of the view before it */
        view[me] < VIEWS - 1 ->
        target = view[me] + 1;
        if
        :: target < VIEWS - 1 -> target++
        :: skip
        fi;
        if
        :: (high[me] > 0 && VIEW_OF(high[me]) == target) || IS_OVER(target - 1) -> view[me] = target
        :: else
        fi;
        clear()
    }
    :: atomic { /* _join_timeouts: one honest voter and the liars gave up a later view */
        view[me] < VIEWS - 1 && ALL1(GAVE_UP, view[me] + 1) + LIARS > LIARS ->
        view[me]++;
        if
        :: timeouts[AT(me, view[me])] == 0 -> give_up(me, view[me])
        :: else
        fi;
        clear()
    }
    :: d_step { /* a crash: what is not durable is lost, and the highest view with a signature of one's own is taken up again */
        target = VIEWS - 1;
        do
        :: target > 0 && prepares[AT(me, target)] == 0 && commits[AT(me, target)] == 0 && timeouts[AT(me, target)] == 0 &&
           !(leader[target] == me && proposals[target] > 0) -> target--
        :: else -> break
        od;
        view[me] = target;
        printf("voter %d crashes and comes back in view %d\n", me, target);
#ifdef BUG_VOLATILE_LOCK
        high[me] = 0;
#endif
#ifdef BUG_AMNESIA
        forgot[me] = 1;
#endif
        clear()
    }
    od
}

init {
    byte i = 0;
    atomic {
        /* Honest voters are interchangeable until one of them leads. */
        if
        :: leader[0] = LIAR
        :: leader[0] = 0
        fi;
        if
        :: leader[1] = LIAR
        :: leader[1] = 0
        :: leader[0] == 0 -> leader[1] = 1
        fi;
#if VIEWS > 2
        if
        :: leader[2] = LIAR
        :: leader[2] = 0
        :: leader[2] = 1
        :: leader[0] == 0 && leader[1] == 1 -> leader[2] = 2
        fi;
#endif
        do
        :: i < HONEST -> run Voter(i); i++
        :: else -> i = 0; break
        od
    }
}

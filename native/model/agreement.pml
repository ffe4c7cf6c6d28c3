/* The agreement on the ranks that go on after a failure: topology/agreement.py, on the decisions of
 * agreement.h. A rank may die before any access. Its descriptors are closed then, and its end is
 * visible to the others some time later. A rank that waits may give up at any time, LATE times in
 * all, so that ranks that are alive are excluded. Creating or opening a segment fails FAILURES times
 * for lack of memory.
 *
 * All ranks that reach the agreement have the same members and segment. All members have entered
 * that segment. None of them is excluded, in any round. A rank that is alive, not late and has
 * memory reaches the agreement. No rank hangs.
 *
 * Memory is sequentially consistent here. In reality a load may return an older value. If a rank
 * finds no decision or no location then, it waits longer, or tries to exclude the other rank, which
 * is a read-modify-write and reads the latest value. Only the location of a creator that has joined
 * the next round must be visible. The creator stores the words of the location, the flag, and the
 * decision in this order. The decision is stored by a release and found by an acquire.
 * ThreadSanitizer checks the real accesses.
 */

#define JOINED 1
#define STRANDED 2
#define EXCLUDED 3

#ifndef ROUNDS
#define ROUNDS (2 * RANKS + 2) /* Segment::agreement_rounds */
#endif
#define ANY 255
#define BIT(rank) (1 << (rank))
#define ALL (BIT(RANKS) - 1)
#define DECISION(number, rank) decision[(number) * RANKS + (rank)]
#define SEGMENT(number) ((number) + 1) /* 0: none */

byte decision[ROUNDS * RANKS];
bool is_published[ROUNDS];
byte open_segment[RANKS]; /* that the rank has created, while others may open it */
bool has_gone[RANKS];
byte deaths = DEATHS;
byte late = LATE;
byte failures = FAILURES;

/* For the assertions. */
byte entered[RANKS]; /* the last segment */
byte outcome;        /* the members on which ranks have agreed */
byte outcome_segment;
byte lost; /* ranks that do not go on although they are alive */

inline die() {
  deaths--;
  open_segment[me] = 0;
  goto killed
}

inline time_out() {
  late = late - (LATE == ANY -> 0 : 1)
}

inline look(number, whose) {
  assert(number < ROUNDS);
  made = DECISION(number, whose)
}

/* Compare-and-swap from none. */
inline decide(number, whose, wanted) {
  atomic {
    if
    :: deaths > 0 -> die()
    :: true
    fi;
    assert(number < ROUNDS);
#ifdef OVERWRITTEN
    DECISION(number, whose) = wanted;
#else
    if
    :: DECISION(number, whose) == 0 -> DECISION(number, whose) = wanted
    :: else
    fi;
#endif
    made = DECISION(number, whose)
  }
}

inline join() {
#ifdef STRANDED_JOINS
  decide(round, me, JOINED);
#else
  decide(round, me, (is_in || round == 0 -> JOINED : STRANDED));
  assert(made == EXCLUDED || made == (is_in || round == 0 -> JOINED : STRANDED));
#endif
  atomic {
    if
#ifndef GOES_ON_EXCLUDED
    :: made == EXCLUDED -> goto excluded
#endif
    :: else
    fi
  }
}

inline wait_for_decision() {
  atomic {
    made = 0;
    if
    :: deaths > 0 -> die()
    :: DECISION(round, whose) != 0 -> look(round, whose)
#ifndef NO_CHECK_FOR_DEATHS
    :: has_gone[whose]
#endif
    :: late > 0 -> time_out()
    fi
  };
  if
#ifdef EXCLUDED_BY_ONE
  :: made == 0 -> made = EXCLUDED
#else
  :: made == 0 -> decide(round, whose, EXCLUDED)
#endif
  :: else
  fi
}

/* Collects the decisions on all members. */
inline complete() {
  atomic { whose = 0; next = 0; has_all = true };
  do
  :: whose < RANKS && (members & BIT(whose)) != 0 ->
     wait_for_decision();
     atomic {
       if
       :: made != EXCLUDED -> next = next | BIT(whose)
       :: else
       fi;
#ifdef STRANDED_COUNT
       has_all = has_all && made != EXCLUDED;
#else
       has_all = has_all && made == JOINED;
#endif
       whose++
     }
  :: whose < RANKS && (members & BIT(whose)) == 0 -> whose++
  :: whose == RANKS -> break
  od;
  atomic {
    if
#ifdef NO_GROUP_FORMED
    :: has_all -> goto reached
#else
    :: has_all && is_in -> goto reached
#endif
    :: else
    fi
  };
  atomic {
    open_segment[me] = 0;
    is_in = false;
    members = next;
    assert((members & BIT(me)) != 0);
    next = 0;
    whose = 0;
    do
    :: (members & BIT(whose)) == 0 -> whose++
    :: else -> break
    od
  }
}

inline publish() {
  atomic {
    if
    :: deaths > 0 -> die()
    :: true
    fi;
    assert(!is_published[round]);
    is_published[round] = true
  }
}

/* The lowest member creates the segment. */
inline create() {
  atomic {
    if
    :: failures > 0 -> failures--; lacks = true
    :: true ->
       open_segment[me] = SEGMENT(round);
       entered[me] = SEGMENT(round);
       is_in = true
    fi
  };
  if
  :: is_in ->
#ifdef PUBLISHED_LATE
     decide(round + 1, me, JOINED);
#endif
     publish()
  :: else -> give_up()
  fi
}

inline wait_for_location() {
  made = 0;
  do
  :: atomic {
       if
       :: deaths > 0 -> die()
       :: is_published[round] -> found = true; break
#ifndef EXCLUDED_CREATOR_AWAITED
       :: DECISION(round + 1, whose) == EXCLUDED -> break
#endif
       /* If the creator has joined, trying to exclude it again would not change anything. */
       :: made == 0 && has_gone[whose]
       :: late > 0 -> time_out(); is_last = true
       fi
     };
#ifdef NO_DECISION_ON_THE_CREATOR
     break
#else
     decide(round + 1, whose, EXCLUDED);
     atomic {
       if
       :: made == EXCLUDED -> break
       :: made != EXCLUDED && is_last -> found = is_published[round]; break
       :: else
       fi
     }
#endif
  od;
  atomic { is_last = false; made = 0 }
}

inline open() {
  atomic {
    if
    :: deaths > 0 -> die()
    :: failures > 0 -> failures--; lacks = true
    :: open_segment[whose] == SEGMENT(round) -> entered[me] = SEGMENT(round); is_in = true
    :: open_segment[whose] != SEGMENT(round)
    fi
  };
  if
  :: is_in
  :: else ->
     atomic {
       if
       :: deaths > 0 -> die()
       :: has_gone[whose]
#ifdef ONE_LOOK
       :: true -> gives_up = true
#else
       :: DECISION(round + 1, whose) == EXCLUDED
       :: DECISION(round + 1, me) != 0
       :: lacks -> gives_up = true
       :: late > 0 -> time_out(); gives_up = true; is_last = true
#endif
       fi
     };
     if
     :: gives_up -> give_up()
     :: else
     fi
  fi;
  atomic { gives_up = false; is_last = false; lacks = false; made = 0 }
}

/* Excludes this rank itself, unless others have done so. */
inline give_up() {
  atomic {
    if
    :: deaths > 0 -> die()
    :: true
    fi;
    look(round + 1, me)
  };
  if
  :: made == 0 ->
#ifndef GIVES_UP_SILENTLY
     decide(round + 1, me, EXCLUDED);
     assert(made == EXCLUDED);
#endif
     goto failed
  :: else
  fi;
  atomic { lacks = false; made = 0 }
}

proctype rank(byte me) {
  byte round, whose, made, next, members = ALL;
  bool is_in, has_all, found, gives_up, is_last, lacks;
  do
  :: join();
     complete();
     if
     :: whose == me -> create()
     :: else ->
        wait_for_location();
        if
        :: found -> found = false; open()
        :: else
        fi
     fi;
     atomic { whose = 0; made = 0; has_all = false; round++ }
  od;

reached:
  atomic {
    assert(is_in && (members & BIT(me)) != 0);
    assert(outcome == 0 || (outcome == members && outcome_segment == round));
    assert((members & lost) == 0);
    outcome = members;
    outcome_segment = round;
    whose = 0;
    do
    :: whose == RANKS -> break
    :: else ->
       assert((members & BIT(whose)) == 0 || entered[whose] == round);
       whose++
    od
  };
  open_segment[me] = 0; /* Group::connect */
  goto leaves;

excluded:
  atomic {
    assert(LATE > 0);
    assert((outcome & BIT(me)) == 0);
    lost = lost | BIT(me)
  };
  open_segment[me] = 0;
  goto leaves;

failed:
  atomic {
    assert(lacks || is_last);
    assert((outcome & BIT(me)) == 0);
    lost = lost | BIT(me)
  };
  if
  :: goto ended
  :: true
  fi;

leaves:
killed:
  atomic {
    has_gone[me] = true;
    round = 0;
    whose = 0;
    made = 0;
    next = 0;
    members = 0;
    is_in = false;
    has_all = false;
    found = false;
    gives_up = false;
    is_last = false;
    lacks = false
  };

ended:
  skip
}

init {
  atomic {
    byte number;
    do
    :: number < RANKS -> run rank(number); number++
    :: else -> break
    od;
    number = 0
  }
}

/* The agreement of the ranks that are left with newcomers: backend/rank_changes.py and newcomers.py
 * on topology/agreement.py.
 *
 * The lowest member of a round plans its group: which newcomers are in it. All of the plan form the
 * group through the store. A process may die before any step, and its end is seen some time later.
 * The records of a process stay in the store when it dies. Ranks are not late here: agreement.pml
 * has that.
 *
 * All ranks that reach the agreement have the group of the same round. A newcomer goes on only in a
 * group on which an old rank has agreed. No old rank hangs, and a newcomer waits for nothing but
 * for a plan, or for old ranks of which none is left.
 */

#define JOINED 1
#define STRANDED 2
#define EXCLUDED 3

#define ROUNDS (DEATHS + 3)
#define MOST (NEW * (DEATHS + 3)) /* announcements */
#define BIT(number) (1 << (number))
#define DECISION(number, rank) decision[(number) * OLD + (rank)]
#define OLD_RANKS (BIT(OLD) - 1)
#define NONE 255

byte decision[ROUNDS * OLD];
byte gone; /* processes */
byte deaths = DEATHS;

/* In the store, by round: the plan, the processes that have arrived, whether a rank has given up. */
bool is_planned[ROUNDS];
byte planned[ROUNDS];  /* the processes in the plan */
byte arrived[ROUNDS];
bool is_abandoned[ROUNDS];

/* In the store, by announcement: the process, and the round of the plan that it is in. */
byte announced[MOST];
byte round_of[MOST];
byte announcements;

/* The group of a round: the ranks that have left it, and whether its first collective has run. */
byte left[ROUNDS];
bool has_begun[ROUNDS];

byte outcome = NONE;   /* the round on which ranks have agreed */

inline may_die(whom) {
  deaths > 0 -> deaths--; gone = gone | BIT(whom); goto killed
}

/* Compare-and-swap from none. */
inline decide(number, whose, wanted) {
  atomic {
    assert(number < ROUNDS);
    if
    :: DECISION(number, whose) == 0 -> DECISION(number, whose) = wanted
    :: else
    fi;
    made = DECISION(number, whose)
  }
}

proctype old_rank(byte me) {
  byte round, members = OLD_RANKS, whose, made, next, number, last;
  bool is_in = true, has_all, is_first = true;

  do
  :: /* Join the round. */
     if
     :: atomic { may_die(me) }
     :: decide(round, me, (is_in -> JOINED : STRANDED))
     fi;
     assert(made != EXCLUDED); /* nobody is late here */
     /* Collect the decisions. */
     whose = 0; next = 0; has_all = true;
     do
     :: whose < OLD && (members & BIT(whose)) ->
        if
        :: atomic { DECISION(round, whose) != 0 -> made = DECISION(round, whose) }
        :: (gone & BIT(whose)) -> decide(round, whose, EXCLUDED)
        :: atomic { may_die(me) }
        fi;
        atomic {
          next = next | (made != EXCLUDED -> BIT(whose) : 0);
          has_all = has_all && made == JOINED;
          whose++
        }
     :: whose < OLD && !(members & BIT(whose)) -> whose++
     :: whose == OLD -> break
     od;
     if
     :: has_all && !is_first -> break
     :: else
     fi;
     /* Leave the group of the round before, and form that of this one. */
     atomic {
       if
       :: !is_first && is_in -> left[round - 1] = left[round - 1] | BIT(me)
       :: else
       fi;
       is_first = false;
       members = next;
       whose = 0;
       do
       :: members & BIT(whose) -> break
       :: else -> whose++
       od
     }
     if
     :: whose == me -> /* plan it: with any newcomers that wait */
        atomic {
          next = members; number = 0;
          do
          :: number < announcements && round_of[number] == NONE &&
               !(gone & BIT(announced[number])) -> next = next | BIT(announced[number]); number++
          :: number < announcements && round_of[number] == NONE -> number++
          :: number < announcements && round_of[number] != NONE -> number++
          :: number == announcements -> break
          od;
          planned[round] = next;
          last = announcements
        }
#ifndef INVITES_FIRST
        if
        :: atomic { may_die(me) }
        :: is_planned[round] = true
        fi;
#endif
        number = 0;
        do
        :: atomic {
             number < last ->
             if
             :: round_of[number] == NONE && (planned[round] & BIT(announced[number])) ->
                round_of[number] = round
             :: else
             fi;
             number++
           }
        :: number == last -> break
        :: atomic { may_die(me) }
        od;
#ifdef INVITES_FIRST
        if
        :: atomic { may_die(me) }
        :: is_planned[round] = true
        fi;
#endif
        next = 0; last = 0
     :: whose != me ->
        do
        :: is_planned[round] -> break
        :: atomic { !is_planned[round] && (gone & BIT(whose)) }
           decide(round + 1, whose, EXCLUDED);
           break
        :: atomic { may_die(me) }
        od
     fi;
     is_in = false;
     if
     :: is_planned[round] ->
        atomic { arrived[round] = arrived[round] | BIT(me) }
        do
        :: (arrived[round] & planned[round]) == planned[round] -> is_in = true; break
        :: atomic { may_die(me) }
        :: atomic {
             (planned[round] & gone & OLD_RANKS) ->
             whose = 0;
             do
             :: planned[round] & gone & BIT(whose) -> break
             :: else -> whose++
             od
           }
           decide(round + 1, whose, EXCLUDED);
           if
           :: made == EXCLUDED -> is_abandoned[round] = true; break
           :: else
           fi
#ifndef NO_CHECK_OF_NEWCOMERS
        :: (planned[round] & gone & ~OLD_RANKS) ->
#ifndef NO_ABANDONING
           is_abandoned[round] = true;
#endif
           break
#endif
        od
     :: !is_planned[round]
     fi;
     round++
  od;
  /* The agreement is reached, on the group of the round before. */
  atomic {
    assert(outcome == NONE || outcome == round - 1);
    outcome = round - 1;
    whose = 0;
    do
    :: members & BIT(whose) -> break
    :: else -> whose++
    od
  }
  if
  :: whose == me ->
     if
     :: atomic { may_die(me) }
     :: has_begun[round - 1] = true
     fi
  :: else
  fi;
killed:
  skip
}

proctype newcomer(byte me) {
  byte own, round;

announce:
  atomic {
    assert(announcements < MOST);
    own = announcements;
    announced[own] = me;
    round_of[own] = NONE;
    announcements++
  }
end:
  if
  :: round_of[own] != NONE -> round = round_of[own]
  :: atomic { may_die(me) }
  fi;
  atomic { arrived[round] = arrived[round] | BIT(me) }
  if
  :: is_planned[round] && (arrived[round] & planned[round]) == planned[round]
  :: is_abandoned[round] -> goto announce
  :: (gone & OLD_RANKS) == OLD_RANKS -> goto killed /* after a timeout */
  :: atomic { may_die(me) }
  fi;
#ifndef NO_FIRST_COLLECTIVE
  /* The first collective, from an old rank. It fails if a rank has gone or left. */
  if
  :: has_begun[round]
  :: left[round] != 0 && !has_begun[round] -> goto announce
  :: (gone & planned[round]) && !has_begun[round] -> goto announce
  :: atomic { may_die(me) }
  fi;
#endif
  assert(outcome == round);
killed:
  skip
}

init {
  atomic {
    byte each;
    do
    :: each < OLD -> run old_rank(each); each++
    :: each >= OLD && each < OLD + NEW -> run newcomer(each); each++
    :: each == OLD + NEW -> break
    od
  }
}

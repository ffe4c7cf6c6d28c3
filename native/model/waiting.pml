/* Collective::enter, Group::advance and Group::wait_for, with the lock on the rank's own step event:
 * RANKS ranks that enter ROUNDS collectives, and read each other's data in each. Every access is
 * one transition. The orders come from the sources. With PHASES=1 a collective has a second phase,
 * for which all ranks advance their steps; with PHASES=2 only rank 0 does, and the others wait.
 *
 * A rank whose peers have entered when it looks briefly leaves the notification to its unlock, or to
 * its next step. So it must not wait before that; a long collective (PHASES=2) notifies at once.
 */

#define NUMBER(r) (r) /* of the entry; the reuse of entries is the subject of entry.pml */
#define EVENT(r) (RANKS + 2 * (r))
#define DATA(r, k) (3 * RANKS + 2 * (r) + ((k) & 1))
#if PHASES
#define STEP(r) (5 * RANKS + (r))
#define LOCATIONS (6 * RANKS)
#else
#define LOCATIONS (5 * RANKS)
#endif

#include "event.pml"

bool has_failed[RANKS];

/* wait_until: `x` is the location, and `order` that of its load. */
inline await(x, order, target) {
  load(x, order, value);
  do
  :: d_step { value >= target -> value = 0 }; break
  :: else ->
     announce(peer);
#ifdef NO_CHECK_BEFORE_SLEEP
     value = 0;
#else
     load(x, order, value);
#endif
     if
     :: value >= target
     :: else -> sleep(peer)
     fi;
     retract(peer);
     load(x, order, value);
     if
     :: value < target && (dead[peer] || has_failed[peer]) ->
        learn_of_death(peer);
#ifndef NO_LAST_CHECK
        load(x, order, value);
#endif
        if
        :: value >= target
        :: else -> assert(LATEST(x) < target); goto failed
        fi
     :: else
     fi
  od
}

#define each_peer(action)        \
  peer = 0;                      \
  do                             \
  :: peer < RANKS ->             \
     if                          \
     :: peer != me -> action     \
     :: else                     \
     fi;                         \
     peer++                      \
  :: else -> break               \
  od;                            \
  peer = 0

inline look() {
  if
  :: all_there -> load(NUMBER(peer), ENTRY_LOAD, value); all_there = value >= k; value = 0
  :: else
  fi
}

inline read_phase() {
  load(DATA(peer, k + 1), relaxed, value);
  assert(value == 16 + k);
  value = 0
}

inline enter() {
#ifdef NOTIFY_FIRST
  notify();
#endif
  store(NUMBER(me), ENTRY_STORE, k);
#ifndef NOTIFY_FIRST
  load(SLEEPERS(me), SLEEPERS_GLANCE, value);
  if
  :: value != LOCKED -> notify()
  :: else
  fi;
  value = 0;
  all_there = true;
  each_peer(look());
  if
#ifdef NO_NOTIFY_BEFORE_WAIT
  :: false -> notify()
#elif defined(NOT_LONG)
  :: !all_there -> notify()
#else
  :: !all_there || PHASES == 2 -> notify()
#endif
  :: else
  fi;
  all_there = false;
#endif
  each_peer(await(NUMBER(peer), ENTRY_LOAD, k))
}

proctype rank(byte me) {
  byte k, peer;
  bool all_there;
  RANK_VARIABLES;
  {
    k = 1;
    do
    :: k <= ROUNDS ->
       atomic {
         lock();
         store(DATA(me, k), relaxed, k)
       };
       enter();
       peer = 0;
       do
       :: peer < RANKS ->
          load(DATA(peer, k), relaxed, value);
          assert(value == k);
          value = 0;
          peer++
       :: else -> break
       od;
       peer = 0;
#if PHASES == 1
       store(DATA(me, k + 1), relaxed, 16 + k);
       store(STEP(me), STEP_STORE, k);
       notify();
       each_peer(await(STEP(peer), STEP_LOAD, k));
       each_peer(read_phase());
#elif PHASES == 2
       if
       :: me == 0 ->
          store(DATA(me, k + 1), relaxed, 16 + k);
          store(STEP(me), STEP_STORE, k);
          notify()
       :: else -> await(STEP(peer), STEP_LOAD, k); read_phase()
       fi;
#endif
       unlock_and_notify();
       k++
    :: else -> break
    od;
    goto done;
failed:
    has_failed[me] = true;
done:
    skip
  } unless { dead[me] }
}

init {
  byte r;
  start_all()
}

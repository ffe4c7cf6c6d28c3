/* Group::advance and Group::wait_step: ranks that enter ROUNDS collectives, and pass data to each
 * other in each. Every access is one transition. STEP_STORE and STEP_LOAD come from the sources.
 */

#define STEP(r) (r)
#define EVENT(r) (RANKS + 2 * r)
#define DATA(r, k) (3 * RANKS + 2 * r + (k & 1)) /* two inline buffers */
#define LOCATIONS (5 * RANKS)

#include "event.pml"

bool has_failed[RANKS];

inline await(target) {
  load(STEP(peer), STEP_LOAD, value);
  do
  :: d_step { value >= target -> value = 0 }; break
  :: else ->
     announce(peer);
#ifdef NO_CHECK_BEFORE_SLEEP
     value = 0;
#else
     load(STEP(peer), STEP_LOAD, value);
#endif
     if
     :: value >= target
     :: else -> sleep(peer)
     fi;
     retract(peer);
     load(STEP(peer), STEP_LOAD, value);
     if
     :: value < target && (dead[peer] || has_failed[peer]) ->
        learn_of_death(peer);
#ifndef NO_LAST_CHECK
        load(STEP(peer), STEP_LOAD, value);
#endif
        if
        :: value >= target
        :: else -> assert(LATEST(STEP(peer)) < target); goto failed
        fi
     :: else
     fi
  od
}

proctype rank(byte me) {
  byte k, peer;
  RANK_VARIABLES;
  {
    k = 1;
    do
    :: k <= ROUNDS ->
       store(DATA(me, k), relaxed, k);
#ifdef NOTIFY_FIRST
       notify(me);
       store(STEP(me), STEP_STORE, k);
#else
       store(STEP(me), STEP_STORE, k);
       notify(me);
#endif
       peer = 0;
       do
       :: peer < RANKS ->
          if
          :: peer != me -> await(k)
          :: else
          fi;
          peer++
       :: else -> break
       od;
       peer = 0;
       do
       :: peer < RANKS ->
          load(DATA(peer, k), relaxed, value);
          assert(value == k);
          peer++
       :: else -> break
       od;
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

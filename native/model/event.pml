/* The event count of wait.h, on the memory of memory.pml: sleep and wake-up of ranks.
 *
 * Any rank may be killed before any transition. A sleep ends by a wake-up, spuriously at most
 * SPURIOUS times in all, and at the end of its slice. But slices end only after a death: so a rank
 * whose wake-up is lost sleeps forever, which Spin reports as an invalid end state.
 *
 * The including model defines RANKS, EVENT(r) (the first of two locations), LOCATIONS, VALUES,
 * DEATHS and SPURIOUS; and the orders SLEEPERS_ADD, SLEEPERS_SUB, SLEEPERS_READ, SLEEPERS_LOAD,
 * SLEEPERS_LOCK, SLEEPERS_UNLOCK, TICKET_LOAD and TICKET_ADD, which come from the sources
 * (check.py).
 */

#define THREADS (2 * RANKS)
#define SLEEPERS(r) EVENT(r)
#define TICKET(r) (EVENT(r) + 1)
#define KERNEL(r) (RANKS + r) /* the kernel's queue of sleepers on r's event, as a thread */
#define LOCKED 64             /* kLocked */

#include "memory.pml"

bool dead[RANKS];
bool asleep[RANKS];
byte sleeps_on[RANKS]; /* the rank on whose event it sleeps */
byte deaths = DEATHS;  /* remaining */
byte spurious = SPURIOUS;

/* A rank is a proctype with the parameter `me` and these variables. */
#define RANK_VARIABLES byte position, other, value, seen

inline announce(owner) {
  add(SLEEPERS(owner), SLEEPERS_ADD, 1, value);
  load(TICKET(owner), TICKET_LOAD, seen)
}

/* The kernel compares and enqueues with the queue locked. */
inline sleep(owner) {
  atomic {
    d_step { join(view[me], view[KERNEL(owner)]) };
    load(TICKET(owner), relaxed, value);
    if
    :: value == seen -> asleep[me] = true; sleeps_on[me] = owner
    :: else
    fi;
    value = 0
  };
  if
  :: !asleep[me]
  :: atomic { spurious > 0 -> spurious--; asleep[me] = false }
  :: deaths < DEATHS -> asleep[me] = false
  fi
}

inline retract(owner) {
  add(SLEEPERS(owner), SLEEPERS_SUB, -1, value);
  seen = 0
}

/* The kernel dequeues with the queue locked. */
inline wake(owner) {
  d_step {
    join(view[KERNEL(owner)], view[me]);
    other = 0;
    do
    :: other < RANKS ->
       if
       :: asleep[other] && sleeps_on[other] == owner -> asleep[other] = false
       :: else
       fi;
       other++
    :: else -> break
    od;
    other = 0;
    value = 0
  }
}

inline notify_if(sleepers_known, owner) {
  if
  :: sleepers_known ->
#ifndef NO_TICKET
     add(TICKET(owner), TICKET_ADD, 1, value);
#endif
#ifndef NO_WAKE
     wake(owner)
#endif
  :: else
  fi;
  value = 0
}

/* A notification of the caller's own event, by a read-modify-write. */
inline notify() {
#ifdef NOTIFY_BY_LOAD
  load(SLEEPERS(me), acquire, value);
#else
  add(SLEEPERS(me), SLEEPERS_READ, 0, value);
#endif
  notify_if((value & (LOCKED - 1)) != 0, me)
}

/* The same of a peer's event, by a load. */
inline notify_peer(owner) {
  load(SLEEPERS(owner), SLEEPERS_LOAD, value);
  notify_if(value != 0, owner)
}

inline lock() {
  add(SLEEPERS(me), SLEEPERS_LOCK, LOCKED, value);
  value = 0
}

inline unlock_and_notify() {
  add(SLEEPERS(me), SLEEPERS_UNLOCK, -LOCKED, value);
#ifndef NO_NOTIFY_AT_UNLOCK
  notify_if(value != LOCKED, me)
#endif
}

/* A process that sees the end of another sees all that it did. */
inline learn_of_death(whose) {
  d_step { join(view[me], view[whose]) }
}

proctype death() {
  byte who;
end:
  if
  :: deaths > 0 ->
     atomic {
       select(who : 0 .. RANKS - 1);
       dead[who] = true;
       deaths--;
       who = 0
     }
  fi
}

inline start_all() {
  atomic {
    r = 0;
    do
    :: r < RANKS -> run rank(r); r++
    :: else -> break
    od;
    r = 0;
    if
    :: DEATHS > 0 -> run death()
    :: else
    fi
  }
}

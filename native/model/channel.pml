/* A channel of the mailbox: rank 0 sends MESSAGES messages through SLOTS slots, and rank 1 receives
 * them. A message has its payload in the slot, or, with PIECES > 0, in so many pieces of a ring of
 * CAPACITY pieces; the first one is published with the slot. Each rank notifies the other's message
 * event. The orders come from the sources.
 */

#define RANKS 2
#define EVENT(r) (2 * (r))
#define TAKEN 4
#define NUMBER(m) (5 + 2 * ((m) % SLOTS))
#define PAYLOAD(m) (6 + 2 * ((m) % SLOTS))
#if PIECES
#define HEAD (5 + 2 * SLOTS)
#define TAIL (6 + 2 * SLOTS)
#define RING(i) (7 + 2 * SLOTS + ((i) % CAPACITY))
#define LOCATIONS (7 + 2 * SLOTS + CAPACITY)
#else
#define LOCATIONS (5 + 2 * SLOTS)
#endif

#include "event.pml"

/* wait_until `x` has the given value or more. */
inline await(x, order, target) {
  load(x, order, value);
  do
  :: d_step { value >= target -> value = 0 }; break
  :: else ->
     announce(me);
     load(x, order, value);
     if
     :: value >= target
     :: else -> sleep(me)
     fi;
     retract(me);
     load(x, order, value);
     if
     :: value < target && dead[1 - me] ->
        learn_of_death(1 - me);
#ifndef NO_LAST_CHECK
        load(x, order, value);
#endif
        if
        :: value >= target
        :: else -> goto failed
        fi
     :: else
     fi
  od
}


inline send() {
  if
  :: m > SLOTS -> await(TAKEN, TAKEN_LOAD, m - SLOTS)
  :: else
  fi;
#ifdef SLOT_FIRST
  store(NUMBER(m), SLOT_STORE, m);
#endif
#if PIECES
  /* The first piece needs no wait: without room, the slot is published without it. */
  store(PAYLOAD(m), relaxed, 0);
  if
  :: i > CAPACITY -> load(TAIL, TAIL_LOAD, value)
  :: else
  fi;
  if
  :: i <= CAPACITY + value ->
     store(RING(i), relaxed, i);
     store(HEAD, HEAD_BEGIN, i);
     store(PAYLOAD(m), relaxed, 1);
     i++
  :: else
  fi;
  value = 0;
#else
  store(PAYLOAD(m), relaxed, m);
#endif
#ifndef SLOT_FIRST
  store(NUMBER(m), SLOT_STORE, m);
#endif
#ifndef NO_NOTIFY_FOR_SLOT
  notify_peer(1);
#endif
#if PIECES
  do
  :: i <= m * PIECES ->
     if
     :: i > CAPACITY -> await(TAIL, TAIL_LOAD, i - CAPACITY)
     :: else
     fi;
#ifdef HEAD_FIRST
     store(HEAD, HEAD_STORE, i);
     store(RING(i), relaxed, i);
#else
     store(RING(i), relaxed, i);
     store(HEAD, HEAD_STORE, i);
#endif
#ifndef NO_NOTIFY_FOR_BYTES
     notify_peer(1);
#endif
     i++
  :: else -> break
  od;
#endif
  skip
}

inline receive() {
  await(NUMBER(m), SLOT_LOAD, m);
#ifdef TAKEN_FIRST
  store(TAKEN, TAKEN_STORE, m);
#endif
  load(PAYLOAD(m), relaxed, value);
#if PIECES
  known = (value > 0 && known < i -> i : known); /* the bytes that came with the slot */
#else
  assert(value == m);
#endif
  value = 0;
#ifndef TAKEN_FIRST
  store(TAKEN, TAKEN_STORE, m);
#endif
#ifndef NO_NOTIFY_FOR_SLOTS
  notify_peer(0);
#endif
#if PIECES
  do
  :: i <= m * PIECES ->
     if
     :: known < i -> await(HEAD, HEAD_LOAD, i); known = i
     :: else
     fi;
#ifdef TAIL_FIRST
     store(TAIL, TAIL_STORE, i);
#endif
     load(RING(i), relaxed, value);
     assert(value == i);
     value = 0;
#ifndef TAIL_FIRST
     store(TAIL, TAIL_STORE, i);
#endif
#ifndef NO_NOTIFY_FOR_SPACE
     notify_peer(0);
#endif
     i++
  :: else -> break
  od;
#endif
  skip
}

proctype rank(byte me) {
  byte m = 1;
  byte i = 1;     /* the next piece */
  byte known = 0; /* for the receiver: the pieces that have arrived, as far as it knows */
  RANK_VARIABLES;
  {
    do
    :: m <= MESSAGES ->
       if
       :: me == 0 -> send()
       :: else -> receive()
       fi;
       m++
    :: else -> break
    od;
    goto done;
failed:
    assert(dead[1 - me]);
    /* All that was published before the death has been received. */
    assert(me == 0 || LATEST(NUMBER(m)) < m || PIECES != 0);
#if PIECES
    assert(me == 0 || LATEST(NUMBER(m)) < m || LATEST(HEAD) < i);
#endif
done:
    skip
  } unless { dead[me] }
}

init {
  byte r;
  start_all()
}

/* A channel of the mailbox: rank 0 sends PIECES pieces through a ring that holds ROOM of them, rank 1
 * receives. Each rings the other's bell. HEAD_STORE, HEAD_LOAD, TAIL_STORE and TAIL_LOAD come from
 * the sources.
 */

#define RANKS 2
#define HEAD 0
#define TAIL 1
#define EVENT(r) (2 + 2 * r)
#define SLOT(i) (6 + ((i) % ROOM))
#define LOCATIONS (6 + ROOM)

#include "event.pml"

#define full (i - value > ROOM) /* `value`: the tail; piece i is the next */
#define empty (value < i)       /* `value`: the head */

/* wait_until the channel is no longer what it was, seen by `look`. */
#define await(look, blocked, last)                                   \
  look;                                                              \
  do                                                                 \
  :: d_step { !blocked -> value = 0 }; break                         \
  :: else ->                                                         \
     announce(me);                                                   \
     look;                                                           \
     if                                                              \
     :: !blocked                                                     \
     :: else -> sleep(me)                                            \
     fi;                                                             \
     rise(me);                                                       \
     look;                                                           \
     if                                                              \
     :: blocked && dead[1 - me] -> learn_of_death(1 - me); last; if \
        :: !blocked                                                  \
        :: else -> goto failed                                       \
        fi                                                           \
     :: else                                                         \
     fi                                                              \
  od

inline look_at_tail() { load(TAIL, TAIL_LOAD, value) }
inline look_at_head() { load(HEAD, HEAD_LOAD, value) }

inline send() {
  await(look_at_tail(), full, look_at_tail());
#ifdef HEAD_FIRST
  store(HEAD, HEAD_STORE, i);
  store(SLOT(i), relaxed, i);
#else
  store(SLOT(i), relaxed, i);
  store(HEAD, HEAD_STORE, i);
#endif
#ifndef NO_BELL_FOR_BYTES
  notify(1)
#endif
}

inline receive() {
#ifdef NO_LAST_LOOK
  await(look_at_head(), empty, skip);
#else
  await(look_at_head(), empty, look_at_head());
#endif
#ifdef TAIL_FIRST
  store(TAIL, TAIL_STORE, i);
#endif
  load(SLOT(i), relaxed, value);
  assert(value == i);
  value = 0;
#ifndef TAIL_FIRST
  store(TAIL, TAIL_STORE, i);
#endif
#ifndef NO_BELL_FOR_ROOM
  notify(0)
#endif
}

proctype rank(byte me) {
  byte i = 1;
  RANK_VARIABLES;
  {
    do
    :: i <= PIECES ->
       if
       :: me == 0 -> send()
       :: else -> receive()
       fi;
       i++
    :: else -> break
    od;
    goto done;
failed:
    assert(dead[1 - me]);
    /* What was sent before the death has been received. */
    assert(me == 0 || LATEST(HEAD) == i - 1);
done:
    skip
  } unless { dead[me] }
}

init {
  byte r;
  start_all()
}

/* A channel of the mailbox: rank 0 sends PIECES pieces through a ring of CAPACITY pieces, and rank
 * 1 receives them. Each notifies the other's message event. HEAD_STORE, HEAD_LOAD, TAIL_STORE and
 * TAIL_LOAD come from the sources.
 */

#define RANKS 2
#define HEAD 0
#define TAIL 1
#define EVENT(r) (2 + 2 * r)
#define SLOT(i) (6 + ((i) % CAPACITY))
#define LOCATIONS (6 + CAPACITY)

#include "event.pml"

#define full (i - value > CAPACITY) /* `value`: the tail; piece i is the next */
#define empty (value < i)       /* `value`: the head */

/* wait_until the channel has changed; `reload` loads its position. */
#define await(reload, blocked, last_check)                                \
  reload;                                                                 \
  do                                                                      \
  :: d_step { !blocked -> value = 0 }; break                              \
  :: else ->                                                              \
     announce(me);                                                        \
     reload;                                                              \
     if                                                                   \
     :: !blocked                                                          \
     :: else -> sleep(me)                                                 \
     fi;                                                                  \
     retract(me);                                                         \
     reload;                                                              \
     if                                                                   \
     :: blocked && dead[1 - me] -> learn_of_death(1 - me); last_check; if \
        :: !blocked                                                       \
        :: else -> goto failed                                            \
        fi                                                                \
     :: else                                                              \
     fi                                                                   \
  od

inline load_tail() { load(TAIL, TAIL_LOAD, value) }
inline load_head() { load(HEAD, HEAD_LOAD, value) }

inline send() {
  await(load_tail(), full, load_tail());
#ifdef HEAD_FIRST
  store(HEAD, HEAD_STORE, i);
  store(SLOT(i), relaxed, i);
#else
  store(SLOT(i), relaxed, i);
  store(HEAD, HEAD_STORE, i);
#endif
#ifndef NO_NOTIFY_FOR_BYTES
  notify(1)
#endif
}

inline receive() {
#ifdef NO_LAST_CHECK
  await(load_head(), empty, skip);
#else
  await(load_head(), empty, load_head());
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
#ifndef NO_NOTIFY_FOR_SPACE
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
    /* All pieces sent before the death have been received. */
    assert(me == 0 || LATEST(HEAD) == i - 1);
done:
    skip
  } unless { dead[me] }
}

init {
  byte r;
  start_all()
}

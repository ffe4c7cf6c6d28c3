/* mailbox_hold.h: threads of one rank that share its mailbox. Two wait for a message each, one posts
 * something, and the peer sends both messages. Who waits never blocks on the mutex: it sleeps on the
 * rank's bell, and whoever held the mutex rings that. Each access to something shared is one
 * transition; memory is sequentially consistent, as all these accesses are. There are no slices here:
 * a thread that is not woken sleeps for ever.
 */

#define WAITERS 2
#define POSTER 2
#define THREADS 3

bool locked;            /* the mutex */
byte wanted;            /* how many wait for it */
bool missed;            /* somebody tried in vain */
bool arrived[WAITERS];  /* in the channels */
bool done[WAITERS];
byte sleepers;          /* on the bell */
bool current[WAITERS];  /* the ticket is still what this one has seen */
bool asleep[THREADS];

hidden byte each;

inline ring() {
  if
  :: sleepers != 0 ->
     d_step { current[0] = false; current[1] = false };
     d_step {
       each = 0;
       do
       :: each < THREADS -> asleep[each] = false; each++
       :: else -> break
       od;
       each = 0
     }
  :: else
  fi
}

/* `held` is a local variable. Who wants the mutex has not got it yet, so a later unlock is sure. */
inline try_lock() {
  if
  :: wanted != 0 -> held = false
  :: else ->
     atomic {
       held = !locked;
       locked = true
     }
  fi
}

inline unlock() {
  locked = false;
#ifndef NO_RING
  if
  :: missed ->
     atomic { held = missed; missed = false };
     if
     :: held -> ring()
     :: else
     fi
  :: else
  fi;
#endif
  held = false
}

inline drive() {
  message = 0;
  do
  :: message < WAITERS ->
     if
     :: arrived[message] && !done[message] -> done[message] = true; moved = true; ring()
     :: else
     fi;
     message++
  :: else -> break
  od;
  message = 0
}

/* Hold(mailbox, try_to_lock), then drive(). */
inline try_drive() {
  moved = false;
  try_lock();
  if
  :: !held ->
#ifndef NO_MISSED
     missed = true;
#endif
#ifndef NO_SECOND_TRY
     try_lock()
#endif
  :: else
  fi;
  if
  :: held -> drive(); unlock()
  :: else
  fi
}

inline look() {
  if
  :: done[me] -> moved = true
  :: else -> try_drive()
  fi;
  if
  :: done[me] -> moved = true
  :: else
  fi
}

proctype waiter(byte me) {
  byte message;
  bool held, moved;
  do
  :: done[me] -> break
  :: else ->
     look();
     if
     :: moved
     :: else ->
        sleepers++;
        current[me] = true;
        look();
        if
        :: moved -> current[me] = false
        :: else ->
           atomic { asleep[me] = current[me]; current[me] = false };
           !asleep[me]
        fi;
        sleepers--
     fi;
     moved = false
  od
}

proctype poster() {
  byte message;
  bool held, moved;
  try_lock();
  if
  :: held
  :: else ->
     wanted++;
     atomic { !locked -> locked = true };
     wanted--
  fi;
  drive(); /* what it posts may be done at once, or something else */
  unlock()
}

proctype peer() {
  byte to;
  do
  :: to < WAITERS -> arrived[to] = true; ring(); to++
  :: else -> break
  od
}

init {
  atomic {
    run waiter(0);
    run waiter(1);
    run poster();
    run peer()
  }
}

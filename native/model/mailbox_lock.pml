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
byte lock_waiters;            /* how many wait for it */
bool lock_missed;            /* somebody tried in vain */
bool arrived[WAITERS];  /* in the channels */
bool done[WAITERS];
byte sleepers;          /* on the bell */
bool current[WAITERS];  /* the ticket is still what this one has seen */
bool asleep[THREADS];

hidden byte each;

inline notify() {
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
  :: lock_waiters != 0 -> owns_lock = false
  :: else ->
     atomic {
       owns_lock = !locked;
       locked = true
     }
  fi
}

inline unlock() {
  locked = false;
#ifndef NO_NOTIFY_AFTER_UNLOCK
  if
  :: lock_missed ->
     atomic { owns_lock = lock_missed; lock_missed = false };
     if
     :: owns_lock -> notify()
     :: else
     fi
  :: else
  fi;
#endif
  owns_lock = false
}

inline progress() {
  message = 0;
  do
  :: message < WAITERS ->
     if
     :: arrived[message] && !done[message] -> done[message] = true; moved = true; notify()
     :: else
     fi;
     message++
  :: else -> break
  od;
  message = 0
}

/* Hold(mailbox, try_to_lock), then drive(). */
inline try_progress() {
  moved = false;
  try_lock();
  if
  :: !owns_lock ->
#ifndef NO_MISSED
     lock_missed = true;
#endif
#ifndef NO_SECOND_TRY
     try_lock()
#endif
  :: else
  fi;
  if
  :: owns_lock -> progress(); unlock()
  :: else
  fi
}

inline check() {
  if
  :: done[me] -> moved = true
  :: else -> try_progress()
  fi;
  if
  :: done[me] -> moved = true
  :: else
  fi
}

proctype waiter(byte me) {
  byte message;
  bool owns_lock, moved;
  do
  :: done[me] -> break
  :: else ->
     check();
     if
     :: moved
     :: else ->
        sleepers++;
        current[me] = true;
        check();
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
  bool owns_lock, moved;
  try_lock();
  if
  :: owns_lock
  :: else ->
     lock_waiters++;
     atomic { !locked -> locked = true };
     lock_waiters--
  fi;
  progress(); /* what it posts may be done at once, or something else */
  unlock()
}

proctype peer() {
  byte to;
  do
  :: to < WAITERS -> arrived[to] = true; notify(); to++
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

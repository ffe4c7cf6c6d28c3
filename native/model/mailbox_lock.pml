/* Mailbox::MailboxLock: threads of one rank that share its mailbox. Two wait for a message each, one
 * posts an operation, and the peer sends both messages. A waiting thread never blocks on the mutex:
 * it sleeps on the rank's message event, which the holder of the mutex notifies. Each access to
 * shared state is one transition; memory is sequentially consistent, as all these accesses are.
 * There are no slices here: a thread that is not woken sleeps forever.
 */

#define WAITERS 2
#define POSTER 2
#define THREADS 3

bool locked;           /* the mutex */
byte lock_waiters;     /* number of threads that block on it */
bool lock_missed;      /* a try_lock has failed */
bool arrived[WAITERS]; /* in the channels */
bool done[WAITERS];
byte sleepers;         /* on the message event */
bool current[WAITERS]; /* the ticket has not changed since this thread read it */
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

/* `owns_lock` is a local variable. A thread that waits for the mutex does not have it yet, so a
 * later unlock is certain.
 */
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

/* MailboxLock(mailbox, try_to_lock), then progress(). */
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
  progress(); /* this may complete the posted operation or another one */
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

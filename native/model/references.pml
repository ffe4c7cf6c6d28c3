/* The references to a value on another worker: rpc/reference_counting.py, rref.py and server.py.
 *
 * Worker 0 has the value made by OWNER, which counts the references of each worker. Workers pass
 * references on, have the value sent, and drop references, in STEPS steps in all. The reports of a
 * worker to the owner arrive in their order, everything else at any time. The owner's own changes
 * are made at once, but if it is worker 0, the call that makes the value comes to it as a message.
 * Workers other than the owner may die; their messages still arrive, and then their death. (A call
 * that is executed later than that may find the value freed, and is left out here.)
 *
 * Who has a reference gets the value. If no worker has died, the value is freed in the end.
 */

#define MOST (2 * STEPS + 4) /* messages in a queue */
#define MAKE 1
#define COUNT 2
#define DEATH 3

#define NONE 0
#define SENT 1
#define WAITS 2

byte steps = STEPS;
byte deaths = DEATHS;
bool is_dead[WORKERS];

/* On each worker, and on the way to it. */
byte references[WORKERS];
byte arriving[WORKERS];
byte lent[WORKERS];    /* uncounted: in calls to the owner, whose arguments the caller keeps */
byte fetch[WORKERS];

chan reports[WORKERS] = [MOST] of { byte, byte, short }; /* kind, holder, amount */

/* On the owner: the entry in its table. */
bool exists, is_created, is_awaited;
short count[WORKERS];
bool is_lost[WORKERS];
bool is_made;

#define KEPT(worker) (lent[worker] + (fetch[worker] != NONE))
#define ANY_COUNT (count[0] || count[1] || (WORKERS > 2 && count[WORKERS - 1]))

/* Each of these is done under the lock of the table. */
inline get_or_create() {
  if
  :: exists
  :: else -> exists = true; is_created = false; is_awaited = false
  fi
}

inline end_if_unused() {
  if
#ifdef FREED_BEFORE_CREATION
  :: !ANY_COUNT ->
#else
  :: !ANY_COUNT && (is_created || !is_awaited) ->
#endif
     /* Nobody may wait for a value that will never come. */
     assert(is_created || (fetch[0] != WAITS && fetch[1] != WAITS && fetch[WORKERS - 1] != WAITS));
     exists = false; is_created = false; is_awaited = false
  :: else
  fi
}

inline apply(holder, amount) {
  if
  :: is_lost[holder]
  :: else ->
     get_or_create();
     count[holder] = count[holder] + amount;
     end_if_unused()
  fi
}

inline report(from, holder, amount) {
  if
  :: from == OWNER -> apply(holder, amount)
  :: else -> reports[from] ! COUNT, holder, amount
  fi
}

inline forget(worker_number) {
  is_lost[worker_number] = true; count[worker_number] = 0;
  if
  :: exists -> end_if_unused()
  :: else
  fi
}

proctype worker(byte me) {
  byte to;

end:
  do
  :: atomic { /* pass it on */
       steps > 0 && references[me] > 0 && !is_dead[me] -> steps--;
       if
       :: to = 0
       :: to = 1
       :: to = WORKERS - 1
       fi;
       report(me, to, 1)
     }
     atomic {
       if
       :: is_dead[me]
       :: else -> arriving[to]++
       fi;
       to = 0
     }
  :: atomic { /* in a call to the owner */
       steps > 0 && references[me] > 0 && !is_dead[me] -> steps--;
       lent[me]++
     }
  :: atomic { /* have it sent */
       steps > 0 && references[me] > 0 && !is_dead[me] && fetch[me] == NONE -> steps--;
       fetch[me] = SENT
     }
  :: atomic {
#ifdef NOTHING_KEPT
       references[me] > 0 && !is_dead[me] ->
#else
       references[me] > KEPT(me) && !is_dead[me] ->
#endif
       references[me]--; report(me, me, -1)
     }
  :: atomic { arriving[me] > 0 -> arriving[me]--; references[me] = references[me] + !is_dead[me] }
  :: atomic {
       deaths > 0 && me != OWNER && !is_dead[me] -> deaths--;
       is_dead[me] = true; references[me] = 0;
       fetch[me] = (fetch[me] == SENT -> SENT : NONE);
       reports[me] ! DEATH, me, 0
     }
  od
}

/* The owner receives from a worker. */
proctype receiver(byte from) {
  byte kind, holder;
  short amount;

end:
  do
  :: atomic {
#ifdef ANY_ORDER
       if
       :: reports[from] ?? MAKE, holder, amount -> kind = MAKE
       :: reports[from] ?? COUNT, holder, 1 -> kind = COUNT; amount = 1
       :: reports[from] ?? COUNT, holder, -1 -> kind = COUNT; amount = -1
       fi;
#else
       reports[from] ? kind, holder, amount;
#endif
       if
       :: kind == MAKE ->
          get_or_create();
          is_created = true; is_made = true;
          /* It has a value for those that wait. */
          fetch[0] = (fetch[0] == WAITS -> NONE : fetch[0]);
          fetch[1] = (fetch[1] == WAITS -> NONE : fetch[1]);
          fetch[WORKERS - 1] = (fetch[WORKERS - 1] == WAITS -> NONE : fetch[WORKERS - 1]);
          if
          :: is_lost[holder] -> end_if_unused()
          :: else -> apply(holder, 1)
          fi
       :: kind == COUNT -> apply(holder, amount)
       :: kind == DEATH -> forget(from)
       fi;
       kind = 0; holder = 0; amount = 0
     }
#ifdef DEATH_FIRST
  :: atomic { is_dead[from] && !is_lost[from] -> forget(from) }
#endif
  :: atomic { /* a call with a reference that is not counted */
       lent[from] > 0 -> lent[from]--;
       if
       :: is_lost[from]
       :: else -> apply(OWNER, 1); references[OWNER]++
       fi
     }
  :: atomic {
       fetch[from] == SENT ->
       if
       :: is_dead[from] -> fetch[from] = NONE
       :: else ->
          assert(exists || !is_made); /* or it is lost */
          get_or_create();
          is_awaited = true;
          fetch[from] = (is_created -> NONE : WAITS)
       fi
     }
  od
}

init {
  byte each;
  atomic {
    references[0] = 1;
    reports[0] ! MAKE, 0, 0;
    do
    :: each < WORKERS -> run worker(each); run receiver(each); each++
    :: else -> break
    od;
    each = 0
  }
  /* Nobody has anything left to do. */
  timeout ->
  do
  :: each < WORKERS -> assert(references[each] == 0 && fetch[each] == NONE); each++
  :: else -> break
  od;
  assert(!exists || deaths < DEATHS)
}

/* The entries of two ranks: Collective::publish, has_entered, ensure_entered and agrees. Rank 0 only
 * gives data, with its entries, and waits for no entry: so it runs ahead of rank 1 by WINDOW - 1
 * collectives. It writes an entry to a place that it has used WINDOW entries before, and compares the
 * last entries of rank 1, which may be writing there. Every access is one transition. The orders come
 * from the sources.
 */

#define THREADS 2
#define ENTERED(r) (r)
#define PLACE(r, k) (2 + 4 * (WINDOW * (r) + (k) % WINDOW))
#define NUMBER(r, k) PLACE(r, k)
#define FINGERPRINT(r, k) (1 + PLACE(r, k)) /* here: the number, as are the history and the data */
#define HISTORY(r, k) (2 + PLACE(r, k))
#define DATA(r, k) (3 + PLACE(r, k))
#define LOCATIONS (2 + 8 * WINDOW)

#include "memory.pml"

inline publish() {
  store(NUMBER(me, k), ENTRY_CLEAR, 0);
  store(FINGERPRINT(me, k), FINGERPRINT_STORE, k);
  store(HISTORY(me, k), ENTRY_HISTORY, k);
#ifdef DATA_LAST
  store(NUMBER(me, k), ENTRY_STORE, k);
  store(DATA(me, k), relaxed, k);
#else
  store(DATA(me, k), relaxed, k);
  store(NUMBER(me, k), ENTRY_STORE, k);
#endif
  store(ENTERED(me), ENTERED_STORE, k)
}

/* No difference is found where there is none. */
inline agrees(whose, n) {
  load(NUMBER(whose, n), LAST_LOAD, value);
  there = value == n;
  load(FINGERPRINT(whose, n), FINGERPRINT_LOAD, value);
  differs = value != n;
  load(HISTORY(whose, n), LAST_HISTORY, value);
  differs = differs || value != n;
#ifndef NO_SECOND_CHECK
  load(NUMBER(whose, n), LAST_CHECK, value);
  there = there && value == n;
#endif
  assert(!there || !differs);
  d_step { value = 0; there = false; differs = false }
}

active proctype giver() {
  byte me = 0, k = 1, n, position, value;
  bool there, differs;
  do
  :: k <= ROUNDS ->
     if
     :: k >= WINDOW ->
        do
        :: load(ENTERED(1), ENTERED_LOAD, value);
           if
#ifdef ENSURED_LATE
           :: value + WINDOW >= k -> break
#else
           :: value + WINDOW > k -> break
#endif
           :: else
           fi
        od;
        value = 0;
        n = (k > WINDOW -> k - WINDOW : 1);
        do
        :: n < k -> agrees(1, n); n++
        :: else -> n = 0; break
        od
     :: else
     fi;
     publish();
     k++
  :: else -> break
  od
}

active proctype taker() {
  byte me = 1, k = 1, position, value;
  bool there, differs;
  do
  :: k <= ROUNDS ->
     publish();
     do
     :: load(NUMBER(0, k), ENTRY_LOAD, value);
        if
        :: value == k -> break
        :: else -> assert(LATEST(NUMBER(0, k)) <= k)
        fi
     od;
     value = 0;
     agrees(0, k);
     load(DATA(0, k), relaxed, value);
     assert(value == k);
     value = 0;
     k++
  :: else -> break
  od
}

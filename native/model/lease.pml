/* A block of leases.h: its word, two words of data, an owner that leases it to one holder after the
 * other, and the messages that tell the holders. The owner sends a message before or after the
 * copy, may give up a copy, and takes the block back if its holder has died or left. A holder that
 * has left returns the block nevertheless, late. Every holder finds the data of its own lease, until
 * it returns it or leaves. No data are overwritten before all reads of them are over. Nobody waits
 * for a process that was killed, nor for a copy that was given up. LEASE_BEGIN, LEASE_FINISH,
 * LEASE_TAKE, LEASE_WAIT and LEASE_RETURN come from the sources; wake-ups are those of waiting.pml.
 */

#define HOLDERS 3
#define THREADS 4             /* the owner is thread 0 */
#define WORD 0                /* the number of the lease * 4 + the state */
#define DATA(i) (1 + (i))
#define READS 3               /* stored when the reads of a holder are over; no part of the code */
#define MESSAGE(holder) (3 + (holder)) /* the number of the lease, once it was sent */
#define LOCATIONS 7
#define STATE(word) ((word) % 4)
#define LEASE(word) ((word) / 4)
#define FREE 0
#define FILLING 1
#define LEASED 2
#define UNWRITTEN 3

#include "memory.pml"

byte deaths = DEATHS;
byte departures = DEPARTURES;
bool dead[THREADS];
bool has_left[THREADS]; /* the owner takes it for dead */
bool over[THREADS]; /* it has ended, or will get no message */

inline may_die() {
  if
  :: deaths > 0 -> atomic { deaths--; dead[me] = true }; goto done
  :: true
  fi
}

/* Compare-and-swap to free, from the holder's own lease. */
inline give_back(from) {
  d_step {
    if
#ifdef ANY_LEASE_ENDS
    :: STATE(LATEST(WORD)) == LEASED || STATE(LATEST(WORD)) == UNWRITTEN ->
       was = LATEST(WORD);
       append(WORD, LEASE_RETURN, was - STATE(was))
#else
    :: LATEST(WORD) == from ->
       append(WORD, LEASE_RETURN, from - STATE(from))
#endif
    :: else
    fi
  }
}

/* By the owner, which sees all that a dead process did, or one that has told that it leaves. */
inline take_back(holder) {
  d_step {
    join(view[me], view[holder]);
    if
    :: STATE(LATEST(WORD)) == LEASED || STATE(LATEST(WORD)) == UNWRITTEN ->
       append(WORD, relaxed, 4 * LEASE(LATEST(WORD)) + FREE)
    :: else
    fi
  }
}

inline copy(i) {
  d_step {
    assert(view[me].at[READS] == memory[READS].last);
    append(DATA(i), relaxed, lease)
  }
}

inline send() { store(MESSAGE(lease), release, lease) }
inline finish(state) { store(WORD, LEASE_FINISH, 4 * lease + (state)) }

active proctype owner() {
  byte me = 0, lease = 1, last = 0, word, position;
  bool sent;
  do
  :: lease > HOLDERS -> break
  :: else ->
#ifndef NOT_FREE_IS_LEASED
     do
     :: STATE(LATEST(WORD)) == FREE ->
        load(WORD, LEASE_BEGIN, word);
        if
        :: STATE(word) == FREE -> break
        :: else
        fi
     :: (dead[last] || has_left[last]) && STATE(LATEST(WORD)) != FREE -> take_back(last)
     od;
#endif
     may_die();
     store(WORD, relaxed, 4 * lease + FILLING);
     sent = false;
     if
     :: send(); sent = true
     :: true
     fi;
     may_die();
#ifdef FINISHED_FIRST
     finish(LEASED);
#endif
     if
     :: copy(0);
        may_die();
        copy(1);
#ifndef FINISHED_FIRST
        finish(LEASED);
#endif
        may_die();
        if
        :: !sent -> send()
        :: else
        fi
     :: sent -> /* interrupted in the middle of the copy */
        copy(0);
#ifndef NOT_MARKED_UNWRITTEN
        finish(UNWRITTEN)
#endif
     :: !sent -> /* no message was made */
        finish(FREE);
        over[lease] = true
     fi;
     may_die();
     last = lease;
     lease++
  od;
done:
  over[0] = true
}

inline receive() {
  d_step {
    view[me].at[MESSAGE(me)] = memory[MESSAGE(me)].last;
    join(view[me], memory[MESSAGE(me)].past[memory[MESSAGE(me)].last].view)
  }
}

inline read_all() {
  load(DATA(0), relaxed, first);
  load(DATA(1), relaxed, second);
  assert(first == me && second == me)
}

proctype holder(byte me) {
  byte word, first, second, was, position;
  LATEST(MESSAGE(me)) != 0 || over[0] || over[me];
  if
  :: LATEST(MESSAGE(me)) == 0 -> goto done
  :: else -> receive()
  fi;
  may_die();
  load(WORD, LEASE_TAKE, word);
  do
  :: STATE(word) != FILLING -> break
  :: else ->
     LATEST(WORD) != word || dead[0];
     if
     :: dead[0] ->
#ifndef NO_LAST_CHECK
        d_step { join(view[me], view[0]) };
        load(WORD, LEASE_WAIT, word);
#endif
        if
        :: STATE(word) == FILLING -> assert(LATEST(WORD) == word); goto done
        :: else
        fi
     :: else -> load(WORD, LEASE_WAIT, word)
     fi
  od;
  assert(LEASE(word) == me && STATE(word) != FREE);
  if
  :: STATE(word) == LEASED ->
     read_all();
     may_die();
     if
     :: true -> read_all(); store(READS, relaxed, me)
     :: departures > 0 ->
        atomic { departures--; d_step { append(READS, relaxed, me) }; has_left[me] = true }
     fi
  :: else
  fi;
  may_die();
  give_back(word);
done:
  over[me] = true
}

init {
  atomic { run holder(1); run holder(2); run holder(3) }
}

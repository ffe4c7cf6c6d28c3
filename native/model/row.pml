/* A row of rows.h: its lock word, two words of it, two writers that update it, a reader at any time,
 * and, where a writer may be killed, somebody who repairs. A reader whose second look says what the
 * first has said has the words of that version and no others; a writer finds the row as the last
 * one has left it. ROW_LOOK, ROW_LOOK_AGAIN, ROW_READ, ROW_TAKE, ROW_PUT and ROW_FREE come from
 * the sources.
 */

#define THREADS 4 /* the reader, two writers, who repairs */
#define LOCK 0    /* the version * 4 + who has the row */
#define WORD(i) (1 + (i))
#define LOCATIONS 3
#define OWNER(word) ((word) % 4)
#define VERSION(word) ((word) / 4)

#include "memory.pml"

byte content[VALUES]; /* of each version: what must be read */
byte fresh = 1;
byte deaths = DEATHS;
bool dead[THREADS];
bool saved[THREADS]; /* with what is set aside: seen by who has seen the end */
byte aside[THREADS];

inline may_die() {
  if
  :: deaths > 0 -> atomic { deaths--; dead[me] = true }; goto done
  :: true
  fi
}

inline publish(what, word) {
  d_step {
    content[VERSION(word) + 1] = what;
#ifdef VERSION_STAYS
    content[VERSION(word)] = what;
    append(LOCK, ROW_FREE, word - OWNER(word))
#else
    append(LOCK, ROW_FREE, 4 * (VERSION(word) + 1))
#endif
  }
}

inline update() {
  saved[me] = false;
  atomic {
    OWNER(LATEST(LOCK)) == 0;
    add(LOCK, ROW_TAKE, me, was)
  };
#ifdef SAVED_FIRST
  saved[me] = true;
#endif
  may_die();
  load(WORD(0), ROW_READ, first);
  load(WORD(1), ROW_READ, other);
  assert(first == content[VERSION(was)] && other == first);
  atomic { aside[me] = first; first = fresh; fresh++ };
  saved[me] = true;
  may_die();
#ifdef FREED_FIRST
  publish(first, was + me);
#endif
  store(WORD(0), ROW_PUT, first);
  may_die();
  store(WORD(1), ROW_PUT, first);
  may_die();
#ifndef FREED_FIRST
  publish(first, was + me)
#endif
}

active proctype first_writer() {
  byte me = 1, was, first, other, place;
  update();
  update();
done:
  skip
}

active proctype second_writer() {
  byte me = 2, was, first, other, place;
  update();
done:
  skip
}

/* The end of a process makes all that it did known to who sees it. */
active proctype repairer() {
  byte me = 3, word;
end:
  do
  :: atomic {
       OWNER(LATEST(LOCK)) != 0 && dead[OWNER(LATEST(LOCK))];
       word = LATEST(LOCK);
       d_step { join(view[me], view[OWNER(word)]) }
     };
     if
#ifndef NOT_PUT_BACK
     :: saved[OWNER(word)] ->
        store(WORD(0), ROW_PUT, aside[OWNER(word)]);
        store(WORD(1), ROW_PUT, aside[OWNER(word)])
#endif
     :: else
     fi;
     publish(content[VERSION(word)], word)
  od
}

active proctype reader() {
  byte me = 0, word, again, first, other, place;
  load(LOCK, ROW_LOOK, word);
  load(WORD(0), ROW_READ, first);
  load(WORD(1), ROW_READ, other);
#ifdef NO_SECOND_LOOK
  again = word;
#else
  load(LOCK, ROW_LOOK_AGAIN, again);
#endif
#ifdef TAKEN_IS_READ
  assert(again != word || (first == content[VERSION(word)] && other == first))
#else
  assert(again != word || OWNER(word) != 0 ||
         (first == content[VERSION(word)] && other == first))
#endif
}

/* A row of rows.h: its lock word, two words of data, two writers that update it, a reader at any
 * time and, if a writer may be killed, a repairer. A reader whose second load of the lock equals
 * the first has the words of that version and no others. A writer finds the row as the last writer
 * left it. ROW_CHECK, ROW_CHECK_AGAIN, ROW_LOAD, ROW_ACQUIRE, ROW_STORE and ROW_RELEASE come from
 * the sources.
 */

#define THREADS 4 /* the reader, two writers, the repairer */
#define LOCK 0    /* the version * 4 + the holder of the row */
#define WORD(i) (1 + (i))
#define LOCATIONS 3
#define OWNER(word) ((word) % 4)
#define VERSION(word) ((word) / 4)

#include "memory.pml"

byte content[VALUES]; /* the expected data of each version */
byte next_content = 1;
byte deaths = DEATHS;
bool dead[THREADS];
bool saved[THREADS]; /* published with the backup; visible to a process that has seen the end */
byte backup[THREADS];

inline may_die() {
  if
  :: deaths > 0 -> atomic { deaths--; dead[me] = true }; goto done
  :: true
  fi
}

inline publish(value, word) {
  d_step {
    content[VERSION(word) + 1] = value;
#ifdef VERSION_STAYS
    content[VERSION(word)] = value;
    append(LOCK, ROW_RELEASE, word - OWNER(word))
#else
    append(LOCK, ROW_RELEASE, 4 * (VERSION(word) + 1))
#endif
  }
}

inline update() {
  saved[me] = false;
  atomic {
    OWNER(LATEST(LOCK)) == 0;
    add(LOCK, ROW_ACQUIRE, me, was)
  };
#ifdef SAVED_FIRST
  saved[me] = true;
#endif
  may_die();
  load(WORD(0), ROW_LOAD, first);
  load(WORD(1), ROW_LOAD, other);
  assert(first == content[VERSION(was)] && other == first);
  atomic { backup[me] = first; first = next_content; next_content++ };
  saved[me] = true;
  may_die();
#ifdef RELEASED_FIRST
  publish(first, was + me);
#endif
  store(WORD(0), ROW_STORE, first);
  may_die();
  store(WORD(1), ROW_STORE, first);
  may_die();
#ifndef RELEASED_FIRST
  publish(first, was + me)
#endif
}

active proctype first_writer() {
  byte me = 1, was, first, other, position;
  update();
  update();
done:
  skip
}

active proctype second_writer() {
  byte me = 2, was, first, other, position;
  update();
done:
  skip
}

/* A process that sees the end of another sees all that it did. */
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
#ifndef NOT_RESTORED
     :: saved[OWNER(word)] ->
        store(WORD(0), ROW_STORE, backup[OWNER(word)]);
        store(WORD(1), ROW_STORE, backup[OWNER(word)])
#endif
     :: else
     fi;
     publish(content[VERSION(word)], word)
  od
}

active proctype reader() {
  byte me = 0, word, again, first, other, position;
  load(LOCK, ROW_CHECK, word);
  load(WORD(0), ROW_LOAD, first);
  load(WORD(1), ROW_LOAD, other);
#ifdef NO_SECOND_CHECK
  again = word;
#else
  load(LOCK, ROW_CHECK_AGAIN, again);
#endif
#ifdef LOCKED_ROW_IS_READ
  assert(again != word || (first == content[VERSION(word)] && other == first))
#else
  assert(again != word || OWNER(word) != 0 ||
         (first == content[VERSION(word)] && other == first))
#endif
}

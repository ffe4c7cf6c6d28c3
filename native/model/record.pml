/* SharedRecord of flight_recorder.h: a writer stores records 1, 2, ... in one place; a reader at any time gets a whole record or knows that it has none. So it is too when the
 * writer was killed: a reader that comes later reads no less than one that comes now. FRAME_STORE,
 * WORD_STORE, WORD_LOAD and FRAME_LOAD come from the sources.
 */

#define THREADS 2
#define FRAME 0
#define WORD(i) (1 + (i)) /* word 0 is the number */
#define WORDS 3
#define LOCATIONS (1 + WORDS)

#include "memory.pml"

active proctype writer() {
  byte me = 0, number = 1, i;
  do
  :: number <= RECORDS ->
#ifndef FRAME_LAST
     store(FRAME, FRAME_STORE, number);
#endif
     i = WORDS;
     do
     :: i > 0 -> i--; store(WORD(i), WORD_STORE, number)
     :: else -> break
     od;
#ifdef FRAME_LAST
     store(FRAME, FRAME_STORE, number);
#endif
#ifdef CLEARED /* where operations are under way, not in the history */
     store(FRAME, FRAME_STORE, 0);
     store(WORD(0), WORD_STORE, 0);
#endif
     number++
  :: else -> break
  od
}

active proctype reader() {
  byte me = 1, number, word, i, place;
  bool mixed;
  load(WORD(0), WORD_LOAD, number);
  i = 1;
  do
  :: i < WORDS ->
     load(WORD(i), WORD_LOAD, word);
     mixed = mixed || word != number;
     i++
  :: else -> break
  od;
  load(FRAME, FRAME_LOAD, word);
  assert(number == 0 || word != number || !mixed)
}

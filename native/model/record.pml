/* SharedRecord of flight_recorder.h: a writer stores records 1, 2, ... in one slot. A reader at any
 * time gets a complete record, or detects that it has none. The same holds if the writer was
 * killed: a later reader sees no less than a reader now. FRAME_STORE, WORD_STORE, WORD_LOAD and
 * FRAME_LOAD come from the sources.
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
#ifdef CLEARED /* a slot of the operations under way, not of the history */
     store(FRAME, FRAME_STORE, 0);
     store(WORD(0), WORD_STORE, 0);
#endif
     number++
  :: else -> break
  od
}

active proctype reader() {
  byte me = 1, number, word, i, position;
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

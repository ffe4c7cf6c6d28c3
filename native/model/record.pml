/* SharedRecord of flight_recorder.h: a writer stores records 1, 2, ... in one slot. A reader at any
 * time gets a complete record, or detects that it has none. The same holds if the writer was
 * killed: a later reader sees no less than a reader now. FRAME_STORE, WORD_STORE, WORD_LOAD and
 * FRAME_LOAD come from the sources.
 *
 * With CLEARED it is a slot of the operations under way: a record is there from the first wait of its
 * operation, whose word for the awaited rank changes, to its end. Operations without a wait are not
 * recorded there, so some numbers are left out. Without CLEARED it is a slot of the history.
 */

#define THREADS 2
#define FRAME 0
#define WORD(i) (1 + (i)) /* word 0 is the number */
#define WORDS 3
#define AWAITED 1 /* the word that changes while the operation is under way: by 16 */
#define LOCATIONS (1 + WORDS)

#include "memory.pml"

active proctype writer() {
  byte me = 0, number = 1, i;
  do
  :: number <= RECORDS ->
     if
#ifdef CLEARED
     :: number < RECORDS -> number++ /* not published */
#endif
     :: skip
     fi;
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
#ifdef CLEARED
     store(WORD(AWAITED), WORD_STORE, number + 16);
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
     mixed = mixed || word % 16 != number;
     i++
  :: else -> break
  od;
  load(FRAME, FRAME_LOAD, word);
  assert(number == 0 || word != number || !mixed)
}

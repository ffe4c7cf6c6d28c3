/* The memory model of C++ rather than Spin's: a location is the list of all values that it ever had
 * (its modification order), and a load may return any of them that is not older than the thread's
 * view. A view is one position in each of these lists. A release store stores the thread's view
 * with the value; an acquire load that returns the value joins that view. A seq_cst load returns
 * nothing older than the last seq_cst store to the location.
 *
 * The including model defines THREADS, LOCATIONS and VALUES (the maximum number of values of a
 * location).
 */

#define relaxed 0
#define consume 1
#define acquire 1
#define release 2
#define acq_rel 3
#define seq_cst 7 /* implies both */

#define ACQUIRES(order) ((order & 1) != 0)
#define RELEASES(order) ((order & 2) != 0)
#define IS_SC(order) ((order & 4) != 0)

typedef View { byte at[LOCATIONS] };
typedef Value { byte data; View view };
typedef Location { Value past[VALUES]; byte last; byte last_sc };

Location memory[LOCATIONS];
View view[THREADS];

hidden byte each;

#define LATEST(x) memory[x].past[memory[x].last].data

inline join(into, from) {
  each = 0;
  do
  :: each < LOCATIONS ->
     if
     :: from.at[each] > into.at[each] -> into.at[each] = from.at[each]
     :: else
     fi;
     each++
  :: else -> break
  od;
  each = 0
}

/* The caller is thread `me`, has a local variable `position`, and passes another for the result. */
inline load(x, order, result) {
  atomic {
    position = view[me].at[x];
    if
    :: IS_SC(order) && memory[x].last_sc > position -> position = memory[x].last_sc
    :: else
    fi;
    do
    :: position < memory[x].last -> position++
    :: break
    od;
    skip; /* no jump into a d_step */
    d_step {
      view[me].at[x] = position;
      if
      :: ACQUIRES(order) -> join(view[me], memory[x].past[position].view)
      :: else
      fi;
      result = memory[x].past[position].data;
      position = 0
    }
  }
}

inline append(x, order, content) {
  assert(memory[x].last + 1 < VALUES);
  memory[x].last++;
  view[me].at[x] = memory[x].last;
  memory[x].past[memory[x].last].data = content;
  memory[x].past[memory[x].last].view.at[x] = memory[x].last;
  if
  :: RELEASES(order) -> join(memory[x].past[memory[x].last].view, view[me])
  :: else
  fi;
  if
  :: IS_SC(order) -> memory[x].last_sc = memory[x].last
  :: else
  fi
}

inline store(x, order, number) {
  d_step { append(x, order, number) }
}

/* Reads the latest value, as an atomic read-modify-write must, and continues its release sequence.
 * `was` is a local variable of the caller.
 */
inline add(x, order, summand, was) {
  d_step {
    was = LATEST(x);
    if
    :: ACQUIRES(order) -> join(view[me], memory[x].past[memory[x].last].view)
    :: else
    fi;
    append(x, order, was + (summand));
    join(memory[x].past[memory[x].last].view, memory[x].past[memory[x].last - 1].view)
  }
}

/* Collective (collective.h) and the collectives built on it: RANKS ranks run the operations OP1, OP2,
 * OP3 and leave. Each access to shared memory is one transition. Any rank may be killed before any
 * of them (DEATHS in all), may stop waiting (TIMEOUTS), and one may be in a different operation
 * (MISMATCHES). With RUNS_AHEAD, ranks that only give data wait for no entry.
 *
 * Memory holds tags instead of data: the operation and chunk that wrote there. Readers assert that
 * they find what the protocol guarantees. Wake-ups are the subject of waiting.pml: here a rank
 * continues when something has changed that its slices would reveal. The words of an entry are the
 * subject of entry.pml: here they are written at once. A piece of the ring takes all of it, so that
 * each piece overlaps the one before.
 */

#ifndef WINDOW
#define WINDOW 2 /* kEntries: entries of a rank that its peers may still read */
#endif
#define SLOTS 2  /* Chunks::kSlots: chunks of a stream that its piece holds */

/* Operations. */
#define NONE 0
#define SMALL 1    /* all data are in the entries, and every rank reads all of them */
#define GIVE 2     /* the data of rank 0 are in its entry */
#define STREAM 3   /* stream.h: rank 0 gives chunks */
#define IN_PLACE 4 /* stream.h: the others read the tensor of rank 0, in its arena */
#define SLICED 5   /* sliced_reduction.h; any number of ranks has published locations; CHAIN: over
                      two caches, the second of which has only the last rank */
#define PARTS 6    /* parts.h, all_to_all */
#define EXCHANGE 7 /* exchange.h: two ranks */
#define TREE 8     /* reduce_over_tree, with all ranks in a chain, or below rank 0 (STAR) */
#define OTHER 16   /* added to a fingerprint that differs */

#define gives_alone(op) (op == GIVE || op == STREAM || op == IN_PLACE)

/* Codes; the abort word holds one with the rank that it is about, and the witness. */
#define LOST 1
#define MISMATCH 2
#define TIMEOUT 3
#define LEFT 4
#define pack(code, about) (code * 16 + about * 4 + me)
#define code_of(status) (status >> 4)
#define about(status) ((status >> 2) & 3)
#define witness(status) (status & 3)

#ifdef ONE_ENTRY
#define AT(r, n) (r)
#else
#define AT(r, n) (WINDOW * (r) + (n) % WINDOW)
#endif
#ifdef ONE_PLACE
#define STAGED(r, c, s) ring[RANKS * SLOTS * (r) + (s)]
#else
#define STAGED(r, c, s) ring[RANKS * (SLOTS * (r) + (c) % SLOTS) + (s)]
#endif
#define TENSOR(r, s) tensor[RANKS * (r) + (s)]

/* The tag of data: operation, chunk, and whether it is combined. */
#define INPUT(k, c) ((k) * 16 + (c) * 2)
#define RESULT(k, c) ((k) * 16 + (c) * 2 + 1)
#define PARTIAL(k, c) ((k) * 16 + (c) * 2 + 8) /* combined by the first of two caches */

/* The caches of a chain. Without CHAIN, all ranks are in one. */
#ifdef CHAIN
#define LENGTH 2
#define SLICES (RANKS - 1)
#define CACHE(r) ((r) / SLICES) /* the last rank has a cache alone */
#define LAST_OWNER(s) (RANKS - 1)
#else
#define LENGTH 1
#define SLICES RANKS
#define CACHE(r) 0
#define LAST_OWNER(s) (s)
#endif
#define is_owner(r, s) (CACHE(r) == 1 || (s) == (r))
/* In each cache, the result of the ranks up to there. */
#define COMBINED(r, k, c) (CACHE(r) == LENGTH - 1 -> RESULT(k, c) : PARTIAL(k, c))

byte step[RANKS];
byte entered[RANKS];
byte number[WINDOW * RANKS], fingerprint[WINDOW * RANKS], history[WINDOW * RANKS];
byte payload[WINDOW * RANKS];
bool is_located[WINDOW * RANKS];
byte ring[SLOTS * RANKS * RANKS];
byte buffer[2]; /* the exchange buffers: tags with the writer in the highest bit */
byte tensor[RANKS * RANKS];
byte word;                          /* the abort word */
bool fingerprints_published[RANKS]; /* published by the witness before the word */
bool left[RANKS], dead[RANKS];
byte deaths = DEATHS; /* remaining */
byte timeouts = TIMEOUTS, mismatches = MISMATCHES;
byte differs;           /* the operation in which one rank differs */
byte differing;         /* that rank */
bool has_failed[RANKS]; /* has failed before */

hidden byte each;

#ifdef NO_PROCESS_CHECK
#define lost(r) false
#else
#define lost(r) dead[r]
#endif
/* A rank that will never enter this collective, so that no rank needs to wait any longer. */
#ifdef AWAIT_ONLY_PEER
#define absent(r) false
#else
#define absent(r) ((lost(r) || left[r]) && entered[r] < entered[me])
#endif
#if RANKS == 2
#define someone_absent (absent(0) || absent(1))
#else
#define someone_absent (absent(0) || absent(1) || absent(2))
#endif

/* LATE */
#define has_ended(r) (dead[r] || left[r])
#define hopeless(r) (dead[r] && entered[r] <= entered[me])

/* Group::abort: the first failure wins, and all ranks report it. */
inline abort_group(why) {
  status = word;
  if
  :: status == 0 ->
#ifdef WORD_BEFORE_FINGERPRINTS
     atomic {
       if
       :: word == 0 -> word = why
       :: else
       fi
     };
     fingerprints_published[me] = true;
#else
     fingerprints_published[me] = true;
     atomic {
#ifdef ABORT_STORES
       word = why
#else
       if
       :: word == 0 -> word = why
       :: else
       fi
#endif
     };
#endif
     status = word
  :: else
  fi;
  assert(fingerprints_published[witness(status)]);
  goto failed
}

/* Group::peer_status: a rank may have left because of a death. */
inline check_peer(whom) {
  if
  :: lost(whom) -> peer_status = pack(LOST, whom)
  :: else ->
     if
     :: left[whom] ->
        if
        :: whom != 0 && me != 0 && lost(0) -> peer_status = pack(LOST, 0)
        :: whom != 1 && me != 1 && lost(1) -> peer_status = pack(LOST, 1)
#if RANKS == 3
        :: whom != 2 && me != 2 && lost(2) -> peer_status = pack(LOST, 2)
#endif
        :: else -> peer_status = pack(LEFT, whom)
        fi
     :: else
     fi
  fi
}

/* Group::status_while_waiting */
inline check_peers() {
  peer_status = word;
  if
  :: peer_status == 0 -> check_peer(peer)
  :: else
  fi;
  other = 0;
  do
  :: other < RANKS && peer_status == 0 ->
     if
     :: other != me && other != peer && absent(other) -> check_peer(other)
     :: else
     fi;
     other++
  :: else -> break
  od;
  other = 0
}

/* A slice may end, and the check of the peers come, some time after the check of `ready`. One such
 * check without effect is allowed for each wait. No rank is reported as missing that had come.
 */
#define await(ready)                                                                        \
  checked = false;                                                                          \
  do                                                                                        \
  :: d_step { (ready) -> checked = false; peer_status = 0 }; break                          \
  :: atomic { !(ready) && timeouts > 0 -> timeouts-- };                                     \
     abort_group(pack(TIMEOUT, peer))                                                       \
  :: !(ready) && (!checked || word != 0 || left[peer] || lost(peer) || someone_absent) ->   \
     checked = true;                                                                        \
     check_peers();                                                                         \
     if                                                                                     \
     :: peer_status == 0                                                                    \
     :: else ->                                                                             \
        if                                                                                  \
        :: LAST_CHECK_IS_MADE && (ready) -> break                                           \
        :: else                                                                             \
        fi;                                                                                 \
        assert(code_of(peer_status) == MISMATCH || code_of(peer_status) == TIMEOUT ||       \
               word != 0 || left[peer] ||                                                   \
               (about(peer_status) == peer -> !(ready) :                                    \
                                              entered[about(peer_status)] < entered[me]));  \
        abort_group(peer_status)                                                            \
     fi                                                                                     \
  od

#ifdef NO_LAST_CHECK
#define LAST_CHECK_IS_MADE false
#else
#define LAST_CHECK_IS_MADE true
#endif

#define await_step(target) await(step[peer] >= target)
#define await_entry() await(number[AT(peer, k)] == k)

/* For all peers, or those that `chosen` selects. */
#define each_peer(chosen, action)         \
  peer = 0;                               \
  do                                      \
  :: peer < RANKS && peer != me && (chosen) -> action; peer++ \
  :: peer < RANKS && (peer == me || !(chosen)) -> peer++      \
  :: peer == RANKS -> break               \
  od;                                     \
  peer = 0

inline advance() { step[me] = step[me] + 1 }

/* ---- entries ---- */

#define fingerprint_of(n) (mine + (differs == n && differing == me -> OTHER : 0))

#ifdef NO_HISTORY
#define HISTORY_DIFFERS(n) false
#else
#define HISTORY_DIFFERS(n) (history[AT(peer, n)] != history[AT(me, n)])
#endif

inline publish(tag, steps, before_base) {
  d_step {
    past = past | (fingerprint_of(k) >= OTHER -> 1 << k : 0); /* the history */
    number[AT(me, k)] = 0
  };
#ifdef ENTRY_BEFORE_DATA
  number[AT(me, k)] = k;
#endif
  d_step {
    fingerprint[AT(me, k)] = fingerprint_of(k);
    history[AT(me, k)] = past;
    is_located[AT(me, k)] = located;
    payload[AT(me, k)] = tag;
    base = step[me] + (steps)
  };
#ifndef ENTRY_BEFORE_DATA
  number[AT(me, k)] = k;
#endif
  step[me] = base - (before_base);
  entered[me] = k
}

inline compare() {
#ifndef NO_COMPARE
  if
  :: fingerprint[AT(peer, k)] != fingerprint_of(k) || HISTORY_DIFFERS(k) ->
     abort_group(pack(MISMATCH, peer))
  :: else
  fi
#else
  skip
#endif
}

/* Compares the entries of a peer that this rank has not waited for. */
inline compare_last(last) {
  n = (last >= WINDOW -> last - WINDOW + 1 : 1);
  do
  :: n <= last ->
     if
     :: number[AT(peer, n)] == n &&
        (fingerprint[AT(peer, n)] != fingerprint[AT(me, n)] || HISTORY_DIFFERS(n)) ->
        abort_group(pack(MISMATCH, peer))
     :: else
     fi;
     n++
  :: else -> break
  od;
  n = 0
}

inline note_entered() {
  atomic {
    if
    :: entered[peer] < least -> least = entered[peer]
    :: else
    fi
  }
}

inline ensure_entered(wanted) {
  if
  :: all_entered < (wanted) ->
     least = entered[me];
     each_peer(true, await(entered[peer] >= (wanted)); note_entered(); compare_last(entered[me]));
     d_step { all_entered = least; least = 0 }
  :: else
  fi
}

inline meet() {
  if
  :: !met -> each_peer(true, await_entry(); compare()); met = true; all_entered = k
  :: else
  fi
}

/* A rank with another fingerprint takes itself for the one that gives. */
#define gives_too (mine == GIVE && differs == k && differing == me)

/* `all`: whether this rank needs the entries of all; else those that give, here rank 0. */
inline enter(tag, staged, all) {
  publish(tag, 2, (staged -> 0 : 1));
  if
  :: (all) || !RUNS_AHEAD -> meet()
  :: else ->
     each_peer(me != 0 && peer == 0 && !gives_too, await_entry(); compare())
  fi;
  /* A difference, even an earlier one, has been found. */
  assert(differs == 0 || differs > k || !met);
  assert(differs == 0 || differs > k || me == 0 || (differing != me && differing != 0) ||
         mine == GIVE)
}

/* ---- places in the ring ---- */

inline wait_steps(target) { each_peer(true, await_step(target)) }

inline reserve() {
#ifndef NO_ENSURE_FINISHED
  if
  :: piece != 0 && piece + WINDOW > k && all_entered <= piece ->
#ifdef WAIT_FOR_NEXT_ENTRY
     ensure_entered(piece + 1);
#else
     ensure_entered(piece);
#endif
     wait_steps(done)
  :: else
  fi;
#endif
  skip; /* no jump into a d_step */
  d_step { piece = k; done = step[me] + 2 }
}

/* ---- collectives ---- */

inline fill(c, tag) {
  d_step {
    each = 0;
    do
    :: each < RANKS ->
       if
       :: mine != SLICED || !is_owner(me, each) -> STAGED(me, c, each) = tag
       :: else
       fi;
       each++
    :: else -> break
    od;
    each = 0
  }
}

inline read_payloads() {
  d_step {
    each = 0;
    do
    :: each < RANKS -> assert(payload[AT(each, k)] == k); each++
    :: else -> break
    od;
    each = 0
  }
}

inline wait_for_takers(target) {
  meet();
  each_peer(peer != 0, await_step(target))
}

inline stream() {
  located = mine == IN_PLACE && me == 0;
  if
  :: me == 0 && mine == STREAM -> reserve(); fill(0, INPUT(k, 0))
  :: else
  fi;
  enter(0, !located, false);
  c = 0;
  do
  :: c < CHUNKS ->
     if
     :: c != 0 && me == 0 && mine == STREAM ->
        if
        :: c >= SLOTS ->
#ifdef CREDIT_EARLY
           wait_for_takers(base + c - SLOTS)
#else
           wait_for_takers(base + c - SLOTS + 1)
#endif
        :: else
        fi;
        fill(c, INPUT(k, c));
        advance()
     :: c != 0 && !(me == 0 && mine == STREAM) -> advance()
     :: else
     fi;
     if
     :: me != 0 && mine == STREAM ->
        if
        :: c != 0 ->
           peer = 0;
#ifdef TAKE_EARLY
           await_step(base + c - 1)
#else
           await_step(base + c)
#endif
        :: else
        fi;
        assert(STAGED(0, c, me) == INPUT(k, c))
     :: me != 0 && mine == IN_PLACE && c == 0 ->
        assert(TENSOR(0, 0) == INPUT(k, 0))
     :: else
     fi;
     c++
  :: else -> break
  od;
  step[me] = base + CHUNKS;
#ifndef NO_WAIT_FOR_TAKERS
  if
  :: located -> wait_for_takers(base + CHUNKS)
  :: else
  fi;
#endif
  located = false
}

/* For each slice that this rank owns: its cache has staged it, and the cache before has combined it. */
inline combine(c) {
  d_step {
    each = 0;
    n = 0;
    do
    :: n < SLICES && each < RANKS ->
       assert(!is_owner(me, n) || CACHE(each) != CACHE(me) || each == me ||
              STAGED(each, c, n) == INPUT(k, c));
       assert(!is_owner(me, n) || CACHE(each) + 1 != CACHE(me) || !is_owner(each, n) ||
              STAGED(each, c, n) == PARTIAL(k, c));
       each++
    :: n < SLICES && each == RANKS -> each = 0; n++
    :: else -> break
    od;
    n = 0;
    do
    :: n < SLICES && is_owner(me, n) -> STAGED(me, c, n) = COMBINED(me, k, c); n++
    :: n < SLICES && !is_owner(me, n) -> n++
    :: else -> break
    od;
    n = 0;
    each = 0
  }
}

inline copy_out(c) {
  d_step {
    each = 0;
    do
    :: each < SLICES -> assert(STAGED(LAST_OWNER(each), c, each) == RESULT(k, c)); each++
    :: else -> break
    od;
    each = 0
  }
}

/* c: the round. */
inline reduce_chunks() {
  c = CACHE(me);
  if
  :: c != 0 -> step[me] = base + c
  :: else
  fi;
  do
  :: c < CHUNKS + LENGTH ->
     if
#ifdef BEGIN_EARLY
     :: c != CACHE(me) ->
#else
     :: c != 0 ->
#endif
#ifdef COPY_OUT_EARLY
        wait_steps(base + c - 1)
#else
        wait_steps(base + c)
#endif
     :: else
     fi;
     if
     :: c >= LENGTH -> copy_out(c - LENGTH)
     :: else
     fi;
     if
     :: c - CACHE(me) + 1 < CHUNKS -> fill(c - CACHE(me) + 1, INPUT(k, c - CACHE(me) + 1))
     :: else
     fi;
     if
     :: c - CACHE(me) < CHUNKS -> combine(c - CACHE(me))
     :: else
     fi;
     step[me] = base + c + 1;
     c++
  :: else -> break
  od
}

inline reduce_in_place() {
  d_step {
    each = 0;
    do
    :: each < RANKS -> assert(TENSOR(each, me) == INPUT(k, 0)); each++
    :: else -> break
    od;
    each = 0
  };
  peer = 0;
  do
  :: peer < RANKS -> TENSOR(peer, me) = RESULT(k, 0); peer++
  :: else -> break
  od;
  peer = 0;
#ifndef NO_EXIT_BARRIER
  step[me] = base + 1;
  wait_steps(base + 1);
#endif
  d_step {
    each = 0;
    do
    :: each < RANKS -> assert(TENSOR(me, each) == RESULT(k, 0)); each++
    :: else -> break
    od;
    each = 0
  }
}

#if RANKS == 2
#define all_located (is_located[AT(0, k)] && is_located[AT(1, k)])
#else
#define all_located (is_located[AT(0, k)] && is_located[AT(1, k)] && is_located[AT(2, k)])
#endif

inline reduce_slices() {
  if
  :: located = true
  :: located = false
  fi;
  reserve();
  if
  :: !located -> fill(0, INPUT(k, 0))
  :: else
  fi;
  enter(0, !located, true);
  if
  :: all_located -> reduce_in_place()
  :: else ->
     if
     :: located -> fill(0, INPUT(k, 0)); advance()
     :: else
     fi;
#ifndef NO_WAIT_FOR_LATE
     each_peer(is_located[AT(peer, k)], await_step(base));
#endif
     reduce_chunks()
  fi;
  located = false
}

inline take(c) {
  d_step {
    each = 0;
    do
    :: each < RANKS -> assert(STAGED(each, c, me) == INPUT(k, c)); each++
    :: else -> break
    od;
    each = 0
  }
}

inline move_parts() {
  reserve();
  fill(0, INPUT(k, 0));
  enter(0, true, true);
  c = 0;
  do
  :: c < CHUNKS ->
     if
     :: c != 0 -> fill(c, INPUT(k, c)); advance()
     :: else
     fi;
#ifdef TAKE_EARLY
     wait_steps(base + c - 1);
#else
     wait_steps(base + c);
#endif
     take(c);
     c++
  :: else -> break
  od;
  step[me] = base + CHUNKS
}

#ifdef STAR
#define PARENT(r) 0
#define is_below(s, r) ((s) == (r) || (r) == 0)
#else
#define PARENT(r) ((r) - 1)
#define is_below(s, r) ((s) >= (r))
#endif

inline meet_neighbour(target) {
  await_entry();
  compare();
  await_step(target)
}

inline copy_block() {
  d_step {
    each = 0;
    do
    :: each < RANKS ->
       if
       :: is_below(each, peer) ->
          assert(STAGED(peer, 0, each) == INPUT(k, 0));
          STAGED(me, 0, each) = INPUT(k, 0)
       :: else
       fi;
       each++
    :: else -> break
    od;
    each = 0
  }
}

inline combine_block() {
  d_step {
    each = 0;
    do
    :: each < RANKS -> assert(STAGED(0, 0, each) == INPUT(k, 0)); each++
    :: else -> break
    od;
    each = 0
  };
  STAGED(0, 0, 0) = RESULT(k, 0)
}

inline reduce_over_tree() {
  reserve();
  STAGED(me, 0, me) = INPUT(k, 0);
  publish(0, 4, 3);
#ifdef PASS_UP_EARLY
  each_peer(peer != 0 && PARENT(peer) == me, meet_neighbour(base - 3); copy_block());
#else
  each_peer(peer != 0 && PARENT(peer) == me, meet_neighbour(base - 2); copy_block());
#endif
  if
  :: me == 0 -> combine_block()
  :: else
  fi;
  step[me] = base - 2;
  if
  :: me != 0 ->
     peer = PARENT(me);
#ifdef PASS_DOWN_EARLY
     meet_neighbour(base - 2);
#else
     meet_neighbour(base - 1);
#endif
     assert(STAGED(peer, 0, peer) == RESULT(k, 0));
     STAGED(me, 0, me) = RESULT(k, 0)
  :: else
  fi;
  d_step { peer = 0; met = true; all_entered = k };
  assert(differs == 0 || differs > k);
  step[me] = base;
  step[me] = base + 1
}

#define OWN_BUFFER(r) buffer[(exchanges + (r)) & 1]

inline exchange() {
  OWN_BUFFER(me) = INPUT(k, 0) + 128 * me;
  enter(0, true, true);
  peer = 1 - me;
  c = 0;
  do
  :: c < CHUNKS ->
     assert(OWN_BUFFER(1 - me) == INPUT(k, c) + 128 * (1 - me));
     if
     :: c + 1 < CHUNKS ->
#ifdef NO_SWAP
        OWN_BUFFER(me) = INPUT(k, c + 1) + 128 * me;
#else
        OWN_BUFFER(1 - me) = INPUT(k, c + 1) + 128 * me;
        exchanges = 1 - exchanges;
#endif
        advance();
        await_step(base + c + 1)
     :: else
     fi;
     c++
  :: else -> break
  od;
#ifndef NO_SWAP
  exchanges = 1 - exchanges;
#endif
  peer = 0
}

/* The constructor of Collective. */
inline begin() {
  d_step {
    mine = (k == 1 -> OP1 : (k == 2 -> OP2 : OP3));
    met = false;
    each = 0;
    do /* the user's data */
    :: each < RANKS && (mine == SLICED || mine == IN_PLACE) && !has_failed[me] ->
       TENSOR(me, each) = INPUT(k, 0);
       each++
    :: else -> break
    od;
    each = 0
  };
  status = word;
  if
  :: status != 0 -> goto failed
  :: else
  fi;
#ifndef DONE_AT_ENTRY
  if
  :: d_step { piece != 0 && piece == k - 1 -> done = step[me] }
  :: else
  fi;
#endif
#ifndef NO_ENSURE_ENTERED
  if
  :: k >= WINDOW -> ensure_entered(k - WINDOW + 1)
  :: else
  fi;
#endif
  if
  :: atomic { mismatches > 0 -> mismatches--; differs = k; differing = me }
  :: skip
  fi
}

proctype rank(byte me) {
  byte k, mine, base, c, n, peer, other, least, peer_status, status;
  byte all_entered, past, piece, done, exchanges;
  bool checked, met, located;
  {
    k = 1;
    do
    :: k <= OPS ->
#ifdef LATE
       /* Rank 0 computes until the others have gone on, once they cannot need it. */
       if
       :: skip
       :: me == 0 && (hopeless(1) || hopeless(2)) -> (has_ended(1) && has_ended(2))
       fi;
#endif
       begin();
       if
       :: mine == SMALL -> enter(k, true, true); read_payloads()
       :: mine == GIVE -> enter(k, true, false); assert(payload[AT(0, k)] == k || me == 0 || gives_too)
       :: mine == STREAM || mine == IN_PLACE -> stream()
       :: mine == SLICED -> reduce_slices()
       :: mine == PARTS -> move_parts()
       :: mine == EXCHANGE -> exchange()
       :: mine == TREE -> reduce_over_tree()
       fi;
failed:
       if
       :: status != 0 ->
          assert(status == word);
          assert(code_of(status) != LOST || dead[about(status)]);
          assert(code_of(status) != LEFT || left[about(status)]);
          assert(code_of(status) != MISMATCH || differs != 0);
          d_step {
            has_failed[me] = true;
            located = false;
            status = 0;
            peer_status = 0;
            checked = false;
            peer = 0;
            n = 0;
            least = 0;
            other = 0
          }
       :: else
       fi;
       d_step { c = 0; base = 0; k++ }
    :: else -> break
    od;
    left[me] = true
  } unless { dead[me] }
}

proctype death() {
  byte who;
end:
  if
  :: deaths > 0 ->
     atomic {
       select(who : 0 .. RANKS - 1);
       dead[who] = true;
       deaths--;
       who = 0
     }
  fi
}

init {
  byte r = 0;
  atomic {
    do
    :: r < RANKS -> run rank(r); r++
    :: else -> break
    od;
    r = 0;
    if
    :: DEATHS > 0 -> run death()
    :: else
    fi
  }
}

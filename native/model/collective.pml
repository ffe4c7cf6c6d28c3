/* Group::enter_collective and the collectives built on it: RANKS ranks run the operations OP1, OP2,
 * OP3 and leave. Each access to shared memory is one transition. Any rank may be killed before any
 * of them (DEATHS in all), may stop waiting (TIMEOUTS), and one may be in a different operation
 * (MISMATCHES).
 *
 * Memory holds tags instead of data: the operation and chunk that wrote there. Readers assert that
 * they find what the protocol guarantees. Wake-ups are the subject of waiting.pml: here a rank
 * continues when something has changed that its slices would reveal.
 */

/* Operations. */
#define NONE 0
#define SMALL 1    /* fits into the inline buffers */
#define MOVE_ONE 2 /* broadcast and similar: rank 0 produces chunks */
#define MOVE_ALL 3 /* all_gather: all ranks produce and consume */
#define REDUCE 4   /* the large all_reduce */
#define EXCHANGE 5 /* reduce_scatter, all_to_all */
#define ZERO_COPY 6   /* all_reduce of tensors in arenas */
#define OTHER 7    /* a different fingerprint */

/* Codes; the abort word holds one with the rank that it is about, and the witness. */
#define LOST 1
#define MISMATCH 2
#define TIMEOUT 3
#define LEFT 4
#define pack(code, about) (code * 16 + about * 4 + me)
#define code_of(status) (status >> 4)
#define about(status) ((status >> 2) & 3)
#define witness(status) (status & 3)

#ifdef ONE_INLINE_BUFFER
#define INLINE(r, k) inline_buffer[2 * (r)]
#else
#define INLINE(r, k) inline_buffer[2 * (r) + ((k) & 1)]
#endif
#ifdef ONE_FINGERPRINT
#define FINGERPRINT(r, k) fingerprint[2 * (r)]
#else
#define FINGERPRINT(r, k) fingerprint[2 * (r) + ((k) & 1)]
#endif
#ifdef ONE_STAGING_PLACE
#define STAGED(r, c, s) staging[RANKS * 2 * (r) + (s)]
#else
#define STAGED(r, c, s) staging[RANKS * (2 * (r) + ((c) & 1)) + (s)]
#endif
#define TENSOR(r, s) tensor[RANKS * (r) + (s)]

/* The tag of a slice: operation, chunk, and whether it is combined. */
#define INPUT(k, c) ((k) * 16 + (c) * 2)
#define RESULT(k, c) ((k) * 16 + (c) * 2 + 1)

byte step[RANKS];
byte fingerprint[2 * RANKS];
byte inline_buffer[2 * RANKS];
byte staging[2 * RANKS * RANKS];
byte tensor[RANKS * RANKS];
byte word;                          /* the abort word */
bool fingerprints_published[RANKS]; /* published by the witness before the word */
bool left[RANKS], dead[RANKS];
byte deaths = DEATHS; /* remaining */
byte timeouts = TIMEOUTS, mismatches = MISMATCHES;
byte differs;           /* the operation in which one rank differs */
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
#define absent(r) ((lost(r) || left[r]) && step[r] < entry_step)
#endif
#if RANKS == 2
#define someone_absent (absent(0) || absent(1))
#else
#define someone_absent (absent(0) || absent(1) || absent(2))
#endif

/* LATE */
#define has_ended(r) (dead[r] || left[r])
#define hopeless(r) (dead[r] && step[r] <= step[me])

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

/* A slice may end, and the check of the peers come, some time after the check of the step. One such
 * check without effect is allowed for each wait.
 */
inline await(target) {
  checked = false;
  do
  :: d_step { step[peer] >= target -> checked = false; peer_status = 0 }; break
  :: atomic { step[peer] < target && timeouts > 0 -> timeouts-- };
     abort_group(pack(TIMEOUT, peer))
  :: step[peer] < target &&
     (!checked || word != 0 || left[peer] || lost(peer) || someone_absent) ->
     checked = true;
     check_peers();
     if
     :: peer_status == 0
     :: else ->
#ifndef NO_LAST_CHECK
        if
        :: d_step { step[peer] >= target -> checked = false; peer_status = 0 }; break
        :: else
        fi;
#endif
        /* No rank is reported as missing that had come. */
        assert(code_of(peer_status) == MISMATCH || code_of(peer_status) == TIMEOUT || word != 0 ||
               step[about(peer_status)] < target || left[peer]);
        abort_group(peer_status)
     fi
  od
}

inline advance() { step[me] = step[me] + 1 }

inline enter_collective() {
#ifdef FINGERPRINT_AFTER_STEP
  advance();
  FINGERPRINT(me, k) = mine;
#else
  FINGERPRINT(me, k) = mine;
  advance();
#endif
  entry_step = step[me];
  peer = 0;
  do
  :: peer < RANKS && peer != me ->
     await(entry_step);
#ifndef NO_COMPARE
     if
     :: FINGERPRINT(peer, k) != mine -> abort_group(pack(MISMATCH, peer))
     :: else
     fi;
#endif
     peer++
  :: peer == me -> peer++
  :: peer == RANKS -> peer = 0; break
  od;
  assert(differs != k)
}

inline await_all(target) {
  peer = 0;
  do
  :: peer < RANKS && peer != me -> await(target); peer++
  :: peer == me -> peer++
  :: peer == RANKS -> break
  od;
  peer = 0
}

/* One transition at any time between two steps: if the data were overwritten before the reader is
 * done with it, some run would show it.
 */
inline read_inline() {
  d_step {
    each = 0;
    do
    :: each < RANKS -> assert(INLINE(each, k) == k); each++
    :: else -> break
    od;
    each = 0
  }
}

inline fill(tag) {
  d_step {
    each = 0;
    do
    :: each < RANKS ->
       if
       :: mine != REDUCE || each != me -> STAGED(me, c, each) = tag
       :: else
       fi;
       each++
    :: else -> break
    od;
    each = 0
  }
}

/* pipeline.h: move_chunks */
inline move_chunks(produces, takes) {
  base = step[me];
  c = 0;
  do
  :: c < CHUNKS ->
     if
     :: produces ->
        peer = 0;
        do
        :: peer < RANKS && peer != me && c >= 2 && (mine == MOVE_ALL || peer != 0) ->
#ifdef PRODUCE_EARLY
           await(base + c - 1);
#else
           await(base + c);
#endif
           peer++
        :: peer == me || (peer < RANKS && (c < 2 || (mine == MOVE_ONE && peer == 0))) -> peer++
        :: peer == RANKS -> peer = 0; break
        od;
        fill(INPUT(k, c))
     :: else
     fi;
     advance();
     peer = 0;
     do
     :: peer < RANKS && peer != me && takes && (mine == MOVE_ALL || peer == 0) ->
#ifdef CONSUME_EARLY
        await(base + c);
#else
        await(base + c + 1);
#endif
        assert(STAGED(peer, c, me) == INPUT(k, c));
        peer++
     :: peer == me || (peer < RANKS && !(takes && (mine == MOVE_ALL || peer == 0))) -> peer++
     :: peer == RANKS -> peer = 0; break
     od;
     c++
  :: else -> break
  od
}

/* pipeline.h: exchange_chunks */
inline exchange() {
  base = step[me];
  c = 0;
  do
  :: c < CHUNKS ->
     fill(INPUT(k, c));
     advance();
     await_all(base + c + 1);
     d_step {
       each = 0;
       do
       :: each < RANKS -> assert(STAGED(each, c, me) == INPUT(k, c)); each++
       :: else -> break
       od;
       each = 0
     };
     c++
  :: else -> break
  od
}

/* reduction.cpp: LargeReduction */
inline reduce_chunks() {
  base = step[me];
  c = 0;
  fill(INPUT(k, 0));
  advance();
  do
  :: c < CHUNKS ->
     if
     :: c + 1 < CHUNKS ->
        c++;
        fill(INPUT(k, c));
        c--;
        advance()
     :: else
     fi;
#ifdef COMBINE_EARLY
     await_all(base + (c == 0 -> 1 : 2 * c) - 1);
#else
     await_all(base + (c == 0 -> 1 : 2 * c));
#endif
     d_step {
       each = 0;
       do
       :: each < RANKS ->
          assert(each == me || STAGED(each, c, me) == INPUT(k, c));
          each++
       :: else -> break
       od;
       STAGED(me, c, me) = RESULT(k, c);
       each = 0
     };
     advance();
#ifndef COPY_OUT_EARLY
     await_all(base + 2 * c + (c + 1 == CHUNKS -> 2 : 3));
#endif
     d_step {
       each = 0;
       do
       :: each < RANKS -> assert(STAGED(each, c, each) == RESULT(k, c)); each++
       :: else -> break
       od;
       each = 0
     };
     c++
  :: else -> break
  od
}

/* reduction.cpp: ZeroCopyReduction, on tensors of which rank r combines slice r */
inline reduce_zero_copy() {
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
  advance();
  await_all(step[me]);
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

/* Group::prepare, and the part of a collective before the entry */
inline begin() {
  d_step {
    mine = (k == 1 -> OP1 : (k == 2 -> OP2 : OP3));
    each = 0;
    do /* the user's data */
    :: each < RANKS && mine == ZERO_COPY && !has_failed[me] ->
       TENSOR(me, each) = INPUT(k, 0);
       each++
    :: else -> break
    od;
    each = 0;
  };
#ifndef NO_PREPARE
  status = word;
  if
  :: status != 0 -> goto failed
  :: else
  fi;
#endif
  INLINE(me, k) = k;
#ifdef NO_PREPARE
  status = word;
  if
  :: status != 0 -> goto failed
  :: else
  fi;
#endif
  if
  :: atomic { mismatches > 0 -> mismatches--; differs = k; mine = OTHER }
  :: skip
  fi
}

proctype rank(byte me) {
  byte k, mine, entry_step, base, c, peer, other, peer_status, status;
  bool checked;
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
       enter_collective();
       if
       :: mine == SMALL -> read_inline()
       :: mine == MOVE_ONE -> move_chunks(me == 0, me != 0)
       :: mine == MOVE_ALL -> move_chunks(true, true)
       :: mine == REDUCE -> reduce_chunks()
       :: mine == EXCHANGE -> exchange()
       :: mine == ZERO_COPY -> reduce_zero_copy()
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
            status = 0;
            peer_status = 0;
            checked = false;
            peer = 0;
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

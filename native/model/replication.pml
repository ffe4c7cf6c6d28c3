/* The two servers of a replicated part of an embedding table, and its trainers:
 * embedding/replication.py, server.py and replicated_server.py.
 *
 * A server may die before any step. Besides, SUSPICIONS times in all a process takes one that is
 * alive for lost, as when the connection between two hosts breaks. The store with the roles lives.
 * An update is a number of the trainer; each server counts the updates that it has made.
 *
 * When a trainer gets the answer to an update, every server that may still serve has made it. In
 * the end no server has made an update twice. No process hangs: a trainer ends with all updates
 * made, or without a server.
 */

#define PRIMARY 0
#define BACKUP 1

/* The roles in the store. The first to change them has the next epoch. */
#define BOTH 0
#define ONLY_PRIMARY 1
#define ONLY_BACKUP 2

#define MADE 1
#define REPLACED 2

#define AT(server, trainer) ((server) * TRAINERS + (trainer))

byte roles = BOTH;
bool is_dead[2];
byte deaths = DEATHS;
byte suspicions = SUSPICIONS;

byte last[2 * TRAINERS];  /* the token of the last update of each trainer, on each server */
byte count[2 * TRAINERS]; /* for the assertions: how many updates were made */

/* A trainer has one call at a time, and never calls a server again that it has left. */
chan call[2] = [TRAINERS] of { byte, byte };
chan answer[2 * TRAINERS] = [1] of { byte };
chan take_over = [TRAINERS] of { byte };
chan taken[TRAINERS] = [1] of { bool };
/* The receiver puts the changes of the primary in order. */
chan changes = [TRAINERS] of { byte, byte };
chan copies = [TRAINERS] of { byte, bool };

inline die(server) {
  atomic {
    deaths > 0;
    deaths--;
    is_dead[server] = true
  }
}

inline update(server, trainer, token) {
  if
#ifndef WITHOUT_TOKENS
  :: last[AT(server, trainer)] == token
#endif
  :: else ->
     last[AT(server, trainer)] = token;
     count[AT(server, trainer)]++
  fi
}

/* Compare-and-set of the roles in the store. */
inline change_roles(wanted, has_changed) {
  atomic {
#ifdef WITHOUT_STORE
    has_changed = true
#else
    if
    :: roles == BOTH -> roles = wanted
    :: else
    fi;
    has_changed = (roles == wanted)
#endif
  }
}

/* Answers all waiting trainers. */
inline answer_all(with) {
  each = 0;
  do
  :: each < TRAINERS && waits[each] ->
     waits[each] = false;
     answer[AT(PRIMARY, each)] ! with;
     each++
  :: each < TRAINERS && !waits[each] -> each++
  :: each == TRAINERS -> break
  od;
  each = 0
}

active proctype primary() {
  bool has_backup = true, is_primary = true, ok;
  bool waits[TRAINERS];
  byte trainer, token, each;

end:
  do
  :: die(PRIMARY) -> break
  :: atomic {
       call[PRIMARY] ? trainer, token ->
       if
       :: !is_primary -> answer[AT(PRIMARY, trainer)] ! REPLACED
       :: is_primary && has_backup ->
          update(PRIMARY, trainer, token);
          changes ! trainer, token;
#ifdef ANSWERS_EARLY
          answer[AT(PRIMARY, trainer)] ! MADE
#else
          waits[trainer] = true
#endif
       :: is_primary && !has_backup ->
          update(PRIMARY, trainer, token);
          answer[AT(PRIMARY, trainer)] ! MADE
       fi;
       trainer = 0;
       token = 0
     }
  :: atomic {
       copies ? trainer, ok ->
       if
       :: ok && waits[trainer] ->
          waits[trainer] = false;
          answer[AT(PRIMARY, trainer)] ! MADE
       :: ok && !waits[trainer]
       :: !ok ->
          is_primary = false;
          has_backup = false;
          answer_all(REPLACED)
       fi;
       trainer = 0;
       ok = false
     }
  :: atomic {
       is_primary && has_backup && (is_dead[BACKUP] || suspicions > 0);
       suspicions = suspicions - (is_dead[BACKUP] -> 0 : 1)
     }
     change_roles(ONLY_PRIMARY, ok);
     atomic {
       has_backup = false;
       if
       :: ok -> answer_all(MADE)
       :: !ok ->
          is_primary = false;
          answer_all(REPLACED)
       fi;
       ok = false
     }
  od
}

active proctype backup() {
  bool is_primary = false, ok;
  byte trainer, token;

end:
  do
  :: die(BACKUP) -> break
  :: atomic {
       changes ? trainer, token ->
       if
#ifndef MAKES_LATE_CHANGES
       :: is_primary -> copies ! trainer, false
#endif
       :: else ->
          update(BACKUP, trainer, token);
          copies ! trainer, true
       fi;
       trainer = 0;
       token = 0
     }
  :: take_over ? trainer ->
     if
     :: is_primary -> ok = true
     :: !is_primary -> change_roles(ONLY_BACKUP, ok)
     fi;
     atomic {
       is_primary = ok;
       taken[trainer] ! ok;
       trainer = 0;
       ok = false
     }
  :: atomic {
       call[BACKUP] ? trainer, token ->
       update(BACKUP, trainer, token);
       answer[AT(BACKUP, trainer)] ! MADE;
       trainer = 0;
       token = 0
     }
  od
}

/* Every server that may still serve has made the updates that were answered. */
inline check_answered(updates) {
  assert(roles == ONLY_BACKUP || is_dead[PRIMARY] || count[AT(PRIMARY, me)] >= updates);
  assert(roles == ONLY_PRIMARY || is_dead[BACKUP] || count[AT(BACKUP, me)] >= updates)
}

active [TRAINERS] proctype trainer() {
  byte me = _pid - 2, token = 1, found, server = PRIMARY;
  bool ok;

  do
  :: token > UPDATES -> break
  :: token <= UPDATES ->
     found = 0;
     call[server] ! me, token;
     if
     :: answer[AT(server, me)] ? found
     :: atomic { is_dead[server] && empty(answer[AT(server, me)]) -> found = REPLACED }
     :: atomic { suspicions > 0 && server == PRIMARY -> suspicions--; found = REPLACED }
     fi;
     if
     :: found == MADE ->
        atomic { check_answered(token); token++ }
     :: found == REPLACED ->
        if
        :: server == BACKUP -> break /* both are lost */
        :: server == PRIMARY ->
           take_over ! me;
           if
           :: taken[me] ? ok
           :: atomic { is_dead[BACKUP] && empty(taken[me]) -> ok = false }
           fi;
           if
           :: ok -> server = BACKUP; ok = false
           :: !ok -> break
           fi
        fi
     fi
  od;
  assert(count[AT(PRIMARY, me)] <= token && count[AT(BACKUP, me)] <= token);
  assert(token <= UPDATES || (count[AT(PRIMARY, me)] <= UPDATES && count[AT(BACKUP, me)] <= UPDATES))
}

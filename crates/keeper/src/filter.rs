//! The seccomp filter of every process of a sandbox: which system calls are refused, and the program that says so.
//!
//! The program is a search tree over call numbers, some hundred instructions. Every live sandbox holds a copy, and the
//! kernel runs it once for every call number at each load, so its size counts in memory and in the time of each start.

use corral_sys::seccomp::{self, Instruction};
use rustix::io::Errno;
use std::collections::BTreeMap;

/// System calls refused with EPERM whatever their arguments. Docker's default profile is the model: what loads code
/// into the kernel, changes mounts, clocks, keys or swap, or opens large attack surfaces that few programs need.
const REFUSED: &[i64] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_kcmp,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_migrate_pages,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_move_pages,
    libc::SYS_nfsservctl,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_uselib,
    libc::SYS_userfaultfd,
    libc::SYS_ustat,
    libc::SYS_vhangup,
    libc::SYS__sysctl,
];

/// Every flag of clone(2) that makes a namespace.
const NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;
/// One more for unshare(2); in clone(2) this bit is part of the exit signal.
const NEW_TIME: u32 = 0x80;

/// System calls refused with EPERM when the low words of their arguments, which are all the kernel looks at, say so.
const REFUSED_WHEN: &[Rule] = &[
    Rule { call: libc::SYS_clone, only: None, argument: 0, when: When::Any(NAMESPACES) },
    Rule { call: libc::SYS_unshare, only: None, argument: 0, when: When::Any(NAMESPACES | NEW_TIME) },
    // Other families are not namespaced, of no use inside, or take memory that is charged to nobody (packet rings).
    Rule {
        call: libc::SYS_socket,
        only: None,
        argument: 0,
        when: When::NoneOf(&[
            libc::AF_UNIX as u32,
            libc::AF_INET as u32,
            libc::AF_INET6 as u32,
            libc::AF_NETLINK as u32,
        ]),
    },
    // Programs for the kernel, of which the whole host has one pool.
    Rule {
        call: libc::SYS_setsockopt,
        only: Some((1, libc::SOL_SOCKET as u32)),
        argument: 2,
        when: When::OneOf(&[libc::SO_ATTACH_FILTER as u32, libc::SO_ATTACH_REUSEPORT_CBPF as u32]),
    },
    // Typing into another's terminal.
    Rule {
        call: libc::SYS_ioctl,
        only: None,
        argument: 1,
        when: When::OneOf(&[libc::TIOCSTI as u32, libc::TIOCLINUX as u32]),
    },
];

/// First system call number that this filter does not know: answered with ENOSYS, as by an older kernel. So are the
/// numbers of the x32 ABI.
const FIRST_UNKNOWN: u32 = 463;
/// Answered likewise, so that programs fall back: clone3, whose flags a filter cannot see, and native asynchronous I/O,
/// of which the whole host has one pool.
const UNKNOWN: &[i64] = &[libc::SYS_clone3, libc::SYS_io_setup];

/// A call that its arguments decide on.
#[derive(Debug)]
struct Rule {
    call: i64,
    /// Asked for only where another argument has this value.
    only: Option<(u32, u32)>,
    argument: u32,
    when: When,
}

/// A test of an argument.
#[derive(Debug, Clone, Copy)]
enum When {
    /// Any of these bits is set.
    Any(u32),
    /// It is one of these.
    OneOf(&'static [u32]),
    /// It is none of these.
    NoneOf(&'static [u32]),
}

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Allow,
    Refuse,
    Unknown,
    /// As the argument says: index into `REFUSED_WHEN`.
    Look(usize),
}

/// The program loaded into every process of a sandbox.
#[derive(Debug, Clone)]
pub struct Filter(Vec<Instruction>);

/// The filter could not be built.
#[derive(Debug, thiserror::Error)]
#[error("the seccomp filter is too long: a jump of {0} instructions")]
pub struct FilterError(usize);

impl Filter {
    /// Builds the program.
    ///
    /// # Errors
    /// When the rules are too many for the program's jumps, which the tests rule out.
    pub fn build() -> Result<Self, FilterError> {
        Program::default().build(&ranges()).map(Self)
    }

    /// Loads it into the calling thread.
    ///
    /// # Errors
    /// Those of seccomp(2).
    pub fn load(&self) -> Result<(), Errno> {
        seccomp::load(&self.0)
    }
}

/// The verdict on every call number, as the first number of each range.
fn ranges() -> Vec<(u32, Verdict)> {
    let mut special: BTreeMap<u32, Verdict> = REFUSED.iter().map(|call| (*call as u32, Verdict::Refuse)).collect();
    special.extend(REFUSED_WHEN.iter().enumerate().map(|(index, rule)| (rule.call as u32, Verdict::Look(index))));
    special.extend(UNKNOWN.iter().map(|call| (*call as u32, Verdict::Unknown)));
    special.insert(FIRST_UNKNOWN, Verdict::Unknown);
    let mut ranges: Vec<(u32, Verdict)> = Vec::new();
    for call in 0..=FIRST_UNKNOWN {
        let verdict = special.get(&call).copied().unwrap_or(Verdict::Allow);
        if ranges.last().is_none_or(|(_, last)| *last != verdict) {
            ranges.push((call, verdict));
        }
    }
    ranges
}

/// Operations of classic BPF, and seccomp's data and answers.
mod bpf {
    pub const LOAD: u16 = 0x20;
    pub const IF_EQUAL: u16 = 0x15;
    pub const IF_AT_LEAST: u16 = 0x35;
    pub const IF_ANY_BIT: u16 = 0x45;
    pub const RETURN: u16 = 0x06;

    pub const CALL_NUMBER: u32 = 0;
    pub const ARCHITECTURE: u32 = 4;
    /// Low word of an argument.
    pub const fn argument(index: u32) -> u32 {
        16 + 8 * index
    }

    pub const X86_64: u32 = 0xc000_003e;
    pub const KILL: u32 = 0x8000_0000;
    pub const ALLOW: u32 = 0x7fff_0000;
    pub const ERRNO: u32 = 0x0005_0000;
}

/// Where a jump leads.
#[derive(Debug, Clone, Copy)]
enum To {
    Line(usize),
    Verdict(Verdict),
}

#[derive(Debug, Clone, Copy)]
struct Line {
    code: u16,
    k: u32,
    /// If true and if false; none where the next line follows, or none does.
    jumps: Option<(To, To)>,
}

/// A program whose jumps still have names. They lead forward only.
#[derive(Debug, Default)]
struct Program(Vec<Line>);

impl Program {
    fn build(mut self, ranges: &[(u32, Verdict)]) -> Result<Vec<Instruction>, FilterError> {
        self.plain(bpf::LOAD, bpf::ARCHITECTURE);
        self.0.push(Line { code: bpf::IF_EQUAL, k: bpf::X86_64, jumps: Some((To::Line(3), To::Line(2))) });
        self.plain(bpf::RETURN, bpf::KILL);
        self.plain(bpf::LOAD, bpf::CALL_NUMBER);
        self.search(ranges);
        let looks: Vec<usize> = REFUSED_WHEN.iter().map(|rule| self.look(rule)).collect();
        let allow = self.plain(bpf::RETURN, bpf::ALLOW);
        let refuse = self.plain(bpf::RETURN, bpf::ERRNO | libc::EPERM as u32);
        let unknown = self.plain(bpf::RETURN, bpf::ERRNO | libc::ENOSYS as u32);
        let line_of = |to: To| match to {
            To::Line(line) => line,
            To::Verdict(Verdict::Allow) => allow,
            To::Verdict(Verdict::Refuse) => refuse,
            To::Verdict(Verdict::Unknown) => unknown,
            To::Verdict(Verdict::Look(index)) => looks[index],
        };
        let distance = |from: usize, to: To| {
            let far = line_of(to) - from - 1;
            u8::try_from(far).map_err(|_| FilterError(far))
        };
        let line = |(at, Line { code, k, jumps }): (usize, &Line)| {
            let (jt, jf) = match jumps {
                Some((yes, no)) => (distance(at, *yes)?, distance(at, *no)?),
                None => (0, 0),
            };
            Ok(Instruction { code: *code, jt, jf, k: *k })
        };
        self.0.iter().enumerate().map(line).collect()
    }

    fn plain(&mut self, code: u16, k: u32) -> usize {
        self.0.push(Line { code, k, jumps: None });
        self.0.len() - 1
    }

    /// Finds the range of the call number in the accumulator.
    fn search(&mut self, ranges: &[(u32, Verdict)]) -> To {
        if let [(_, verdict)] = ranges {
            return To::Verdict(*verdict);
        }
        let (low, high) = ranges.split_at(ranges.len() / 2);
        let at = self.plain(bpf::IF_AT_LEAST, high[0].0);
        let below = self.search(low);
        let above = self.search(high);
        self.0[at].jumps = Some((above, below));
        To::Line(at)
    }

    /// Tests the arguments; the line it begins at.
    fn look(&mut self, Rule { only, argument, when, .. }: &Rule) -> usize {
        let start = self.0.len();
        if let Some((other, value)) = only {
            let test = self.plain(bpf::LOAD, bpf::argument(*other)) + 1;
            let jumps = Some((To::Line(test + 1), To::Verdict(Verdict::Allow)));
            self.0.push(Line { code: bpf::IF_EQUAL, k: *value, jumps });
        }
        self.plain(bpf::LOAD, bpf::argument(*argument));
        let (code, values) = match when {
            When::Any(bits) => (bpf::IF_ANY_BIT, std::slice::from_ref(bits)),
            When::OneOf(values) | When::NoneOf(values) => (bpf::IF_EQUAL, *values),
        };
        let (hit, miss) = match when {
            When::NoneOf(_) => (Verdict::Allow, Verdict::Refuse),
            When::Any(_) | When::OneOf(_) => (Verdict::Refuse, Verdict::Allow),
        };
        for (index, k) in values.iter().enumerate() {
            let last = index + 1 == values.len();
            let no = if last { To::Verdict(miss) } else { To::Line(self.0.len() + 1) };
            self.0.push(Line { code, k: *k, jumps: Some((To::Verdict(hit), no)) });
        }
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSE: u32 = bpf::ERRNO | libc::EPERM as u32;
    const NOT_THERE: u32 = bpf::ERRNO | libc::ENOSYS as u32;

    /// Runs a program as the kernel would.
    fn answer(Filter(program): &Filter, architecture: u32, call: i64, arguments: [u64; 6]) -> u32 {
        let word = |at: u32| match at {
            bpf::CALL_NUMBER => call as u32,
            bpf::ARCHITECTURE => architecture,
            _ => arguments[(at as usize - 16) / 8] as u32,
        };
        let (mut at, mut accumulator) = (0, 0);
        loop {
            let Instruction { code, jt, jf, k } = program[at];
            let holds = match code {
                bpf::RETURN => return k,
                bpf::LOAD => {
                    accumulator = word(k);
                    at += 1;
                    continue;
                }
                bpf::IF_EQUAL => accumulator == k,
                bpf::IF_AT_LEAST => accumulator >= k,
                bpf::IF_ANY_BIT => accumulator & k != 0,
                other => panic!("{other:#x}"),
            };
            at += 1 + usize::from(if holds { jt } else { jf });
        }
    }

    fn of(call: i64, arguments: [u64; 6]) -> u32 {
        answer(&Filter::build().unwrap(), bpf::X86_64, call, arguments)
    }

    #[test]
    fn every_call_number_has_the_verdict_of_the_lists() {
        let filter = Filter::build().unwrap();
        for call in (0..5000).chain(0x4000_0000..0x4000_0400) {
            let expected = match call {
                _ if REFUSED.contains(&call) => REFUSE,
                _ if UNKNOWN.contains(&call) || call >= i64::from(FIRST_UNKNOWN) => NOT_THERE,
                libc::SYS_socket => REFUSE, // family 0
                _ => bpf::ALLOW,
            };
            assert_eq!(answer(&filter, bpf::X86_64, call, [0; 6]), expected, "call {call}");
        }
        assert_eq!(answer(&filter, bpf::X86_64, -1, [0; 6]), NOT_THERE);
    }

    #[test]
    fn other_architectures_are_killed_whatever_they_call() {
        let filter = Filter::build().unwrap();
        for call in [0, libc::SYS_clone3, 4000, 0x4000_0001] {
            assert_eq!(answer(&filter, 0x4000_0003, call, [0; 6]), bpf::KILL);
        }
    }

    #[test]
    fn arguments_decide_where_they_are_looked_at() {
        let first = |value: u64| [value, 0, 0, 0, 0, 0];
        let second = |value: u64| [0, value, 0, 0, 0, 0];
        for flag in (0..32).map(|bit| 1u64 << bit) {
            let namespace = flag as u32 & NAMESPACES != 0;
            assert_eq!(of(libc::SYS_clone, first(flag)) == REFUSE, namespace, "clone {flag:#x}");
            assert_eq!(of(libc::SYS_unshare, first(flag)) == REFUSE, namespace || flag == 0x80, "unshare {flag:#x}");
        }
        assert_eq!(of(libc::SYS_clone, first(libc::CLONE_VM as u64 | libc::CLONE_NEWUSER as u64)), REFUSE);
        for family in 0..50u64 {
            let good = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK].contains(&(family as i32));
            // The kernel takes an int: what stands above it changes nothing.
            for value in [family, family | 1 << 40] {
                assert_eq!(of(libc::SYS_socket, first(value)) == REFUSE, !good, "socket {value:#x}");
            }
        }
        for request in [libc::TIOCSTI, libc::TIOCLINUX, libc::TIOCSTI | 1 << 32] {
            assert_eq!(of(libc::SYS_ioctl, second(request)), REFUSE);
            assert_eq!(of(libc::SYS_ioctl, first(request)), bpf::ALLOW);
        }
        assert_eq!(of(libc::SYS_ioctl, second(libc::TIOCGWINSZ)), bpf::ALLOW);
        let option = |value: i32| [3, libc::SOL_SOCKET as u64, value as u64, 0, 0, 0];
        assert_eq!(of(libc::SYS_setsockopt, option(libc::SO_ATTACH_FILTER)), REFUSE);
        assert_eq!(of(libc::SYS_setsockopt, option(libc::SO_REUSEADDR)), bpf::ALLOW);
        let v6_only = [3, libc::IPPROTO_IPV6 as u64, libc::IPV6_V6ONLY as u64, 0, 0, 0];
        assert_eq!(libc::IPV6_V6ONLY, libc::SO_ATTACH_FILTER, "one number, two levels");
        assert_eq!(of(libc::SYS_setsockopt, v6_only), bpf::ALLOW);
    }

    #[test]
    fn the_program_stays_small() {
        assert!(Filter::build().unwrap().0.len() < 160);
    }
}

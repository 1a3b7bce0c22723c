use std::hint::black_box; 
fn cpu()->u64{std::fs::read_to_string("/proc/thread-self/schedstat").unwrap().split(' ').next().unwrap().parse().unwrap()}

use usurp_srp::*; use usurp_srp::login::*; use usurp_srp::target::*; use usurp_srp::initiator::{self,InBuf,OutBuf};
fn main(){
 let t=PortId::from_halves(1,2); let p=Policy::new(t);
 let req=initiator::linux_login(t,t,MultiChannel::Single);
 let l=check(Format::IbCm64,&initiator::login_req(Format::IbCm64,&req),&p).unwrap();
 let mut ch=Channel::new(&l,ChannelConfig{credits:128,ioctxs:256,max_ti_iu_len:512,max_transfer:1<<20,max_descs:2048});
 ch.advance(ChannelState::Live);
 let g=initiator::login_answer(&l.rsp(MultiChannelResult::NoChannels),&req).unwrap();
 let mut i=initiator::Channel::new(&g,initiator::Config{slots:64});
 let mut iu=[0u8;256]; let d=MemDesc{va:0x7f0000,key:7,len:4096};
 let (_,n)=i.start_cmd(&[0x28,0,0,0,0,0,0,0,8,0],1<<48,OutBuf::None,InBuf::Direct(d),1,&mut iu).unwrap();
 let mut b=[0u8;512]; let m:u32=std::env::args().nth(1).map_or(20_000_000,|a|a.parse().unwrap());
 for _ in 0..3 {
 let s=cpu();
 for _ in 0..m { match ch.on_iu(black_box(&iu[..n])) { Received::Command(c)=>{ black_box(&c); let n=ch.rsp(c.ioctx,&CmdResult::default(),&mut b); black_box(&b[..n]); ch.on_sent(c.ioctx);} _=>unreachable!() } }
 println!("target on_iu+rsp+on_sent {:.1} ns", (cpu()-s) as f64/m as f64);
 let s=cpu();
 for _ in 0..m { match ch.on_iu(black_box(&iu[..n])) { Received::Command(c)=>{ black_box(&c); ch.finish_silently(c.ioctx); let id=c.ioctx; black_box(id); if ch.credits().owed()>=100 { ch.cred_req(&mut b); ch.on_cred_req_sent(); ch.on_iu(&[0x41;16]); } } _=>unreachable!() } }
 println!("target on_iu + silent {:.1} ns", (cpu()-s) as f64/m as f64);
 let mut i=initiator::Channel::new(&g,initiator::Config{slots:64});
 let s=cpu();
 for _ in 0..m { let (_,n)=i.start_cmd(&[0x28,0,0,0,0,0,0,0,8,0],1<<48,OutBuf::None,InBuf::Direct(d),1,&mut iu).unwrap();
  match ch.on_iu(black_box(&iu[..n])) { Received::Command(c)=>{ black_box(&c); let n=ch.rsp(c.ioctx,&CmdResult::default(),&mut b); ch.on_sent(c.ioctx); black_box(i.on_iu(black_box(&b[..n]))); } _=>unreachable!() } }
 println!("both roles {:.1} ns", (cpu()-s) as f64/m as f64);
 }
}
